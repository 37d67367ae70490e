"""Needles in a haystack: secret numbers in running text, asked for by the name they belong to."""

from random import Random

from kvcompress.evals.generate.draft import Draft, Setting, digits, unused
from kvcompress.evals.generate.words import ADJECTIVES, NOUNS
from kvcompress.evals.haystack import hide

INTRODUCTION = "The text below hides one or more secret numbers. Read all of it; a question about them comes after it."


def needle(rng: Random, setting: Setting, depth: float, *, keys: int = 1, values: int = 1, queries: int = 1) -> Draft:
    """Hide ``keys`` names with ``values`` numbers of seven digits each and ask for ``queries`` of the names.

    The first answer stands at ``depth``, all other needles at random depths. ``keys=4`` is the multi-key task,
    ``values=4`` multi-value, ``keys=4, queries=4`` multi-query. After the needle tasks of RULER
    (arXiv 2404.06654, section 3, niah) with their number of needles; the wording is our own, so scores compare
    between methods here and not with the paper's. Raises ``ValueError`` for fewer keys than queries.
    """
    if not 1 <= queries <= keys or values < 1:
        raise ValueError(
            f"needle(keys={keys}, values={values}, queries={queries}): expected 1 <= queries <= keys and values >= 1"
        )
    taken: set[str] = set()
    names = [name(rng, setting, taken) for _ in range(keys)]
    numbers = [[unused(lambda: digits(rng, 7), setting.haystack, taken) for _ in range(values)] for _ in names]
    needles = [(rng.random(), sentence(names[i], number, values == 1)) for i in range(keys) for number in numbers[i]]
    needles[0] = (depth, needles[0][1])
    start = rng.randrange(len(setting.haystack.sentences))
    asked = names[0] if queries == 1 else ", ".join(names[: queries - 1]) + f" and {names[queries - 1]}"
    if values * queries == 1:
        question, answer_prefix = ask(asked), f"The secret number of {asked} is"
    else:
        question = f"Question: What are all the secret numbers of {asked} in the text above?\n"
        answer_prefix = f"The secret numbers of {asked} are:"
    return Draft(
        context=lambda units: f"{INTRODUCTION}\n\n{hide(setting.haystack.take(start, units), needles)}\n\n",
        question=question,
        answer_prefix=answer_prefix,
        answers=tuple(number for i in range(queries) for number in numbers[i]),
        depth=depth,
    )


def name(rng: Random, setting: Setting, taken: set[str]) -> str:
    """A new name such as ``amber-lantern``."""
    return unused(lambda: f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}", setting.haystack, taken)


def sentence(key: str, number: str, only_one: bool) -> str:
    """The needle itself."""
    return f"{'The' if only_one else 'One'} secret number of {key} is {number}."


def ask(key: str) -> str:
    """The question for one number."""
    return f"Question: What is the secret number of {key} in the text above?\n"
