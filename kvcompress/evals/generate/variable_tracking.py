"""Variable tracking: chains of assignments scattered in text; which variables hold a value?"""

import string
from random import Random

from kvcompress.evals.generate.draft import Draft, Setting, digits, unused
from kvcompress.evals.haystack import hide

INTRODUCTION = (
    "Assignments of variables are scattered in the text below. Read all of it; a question about them comes after it."
)


def variable_tracking(rng: Random, setting: Setting, depth: float, *, chains: int = 2, hops: int = 4) -> Draft:
    """Hide ``chains`` chains of ``hops`` copies each and ask for all ``hops + 1`` variables of the first chain.

    The first assignment of the chain asked for stands at ``depth``, its copies in order at random depths behind
    it. After RULER's variable tracking (arXiv 2404.06654, section 3): four hops as there, but a second chain
    that must be told apart, running text in place of repeated noise, and wording of our own. Raises
    ``ValueError`` for less than one chain or a negative number of hops.
    """
    if chains < 1 or hops < 0:
        raise ValueError(f"variable_tracking(chains={chains}, hops={hops}): expected chains >= 1 and hops >= 0")
    taken: set[str] = set()
    needles: list[tuple[float, str]] = []
    variables: list[list[str]] = []
    values: list[str] = []
    for number in range(chains):
        first = depth if number == 0 else rng.uniform(0, 0.5)
        depths = [first, *sorted(first + (1 - first) * rng.random() for _ in range(hops))]
        chain = [unused(lambda: letters(rng), setting.haystack, taken) for _ in range(hops + 1)]
        values.append(unused(lambda: digits(rng, 5), setting.haystack, taken))
        sources = [values[-1], *chain]
        needles += [(depths[i], f"SET {chain[i]} = {sources[i]}.") for i in range(hops + 1)]
        variables.append(chain)
    start = rng.randrange(len(setting.haystack.sentences))
    return Draft(
        context=lambda units: f"{INTRODUCTION}\n\n{hide(setting.haystack.take(start, units), needles)}\n\n",
        question=f"Question: Which variables in the text above hold {values[0]}, directly or as a copy of a copy?\n",
        answer_prefix=f"The {hops + 1} variables that hold {values[0]} are:",
        answers=tuple(variables[0]),
        depth=depth,
    )


def letters(rng: Random) -> str:
    """A variable's name of five capital letters."""
    return "".join(rng.choice(string.ascii_uppercase) for _ in range(5))
