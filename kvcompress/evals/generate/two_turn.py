"""Two questions on one text: the second asks for what the first did not."""

from random import Random

from kvcompress.evals.generate.draft import Draft, Setting, digits, unused
from kvcompress.evals.generate.needle import INTRODUCTION, ask, name, sentence
from kvcompress.evals.haystack import hide


def two_turn(rng: Random, setting: Setting, depth: float, *, keys: int = 4) -> Draft:
    """Hide ``keys`` secret numbers; one is asked for and answered, then another is asked for and scored.

    The scored number stands at ``depth``, the first one at least a quarter of the haystack away from it. The
    first answer is given (teacher-forced), so that every method meets the same second turn. The query-aware form
    compresses with the first question in sight and never the second, as a cache kept between turns does; after
    the multi-turn setting of SCBench (arXiv 2412.10319). Raises ``ValueError`` for fewer than two keys.
    """
    if keys < 2:
        raise ValueError(f"two_turn(keys={keys}): expected at least 2, one for each question")
    taken: set[str] = set()
    names = [name(rng, setting, taken) for _ in range(keys)]
    numbers = [unused(lambda: digits(rng, 7), setting.haystack, taken) for _ in names]
    depths = [rng.random() for _ in names]
    depths[:2] = [(depth + rng.uniform(0.25, 0.75)) % 1.0, depth]
    needles = [(depths[i], sentence(names[i], numbers[i], True)) for i in range(keys)]
    start = rng.randrange(len(setting.haystack.sentences))
    first, second = names[:2]
    first_answer = f"The secret number of {first} is {numbers[0]}.\n\n"
    return Draft(
        context=lambda units: f"{INTRODUCTION}\n\n{hide(setting.haystack.take(start, units), needles)}\n\n",
        question=ask(first) + first_answer + ask(second),
        answer_prefix=f"The secret number of {second} is",
        answers=(numbers[1],),
        depth=depth,
        first_question=ask(first),
    )
