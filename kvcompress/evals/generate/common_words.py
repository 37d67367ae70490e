"""Common words: which words stand in a long list far more often than the others?"""

from math import ceil
from random import Random

from kvcompress.evals.generate.draft import Draft, Setting

INTRODUCTION = "Below is a list of words. Some of them are repeated very often. A question about it comes after it."
OFTEN = 10
"""How many times as often as another word a common word stands in the list (RULER: 30 against 3)."""


def common_words(rng: Random, setting: Setting, depth: None = None, *, words: int = 10) -> Draft:
    """Shuffle ``words`` common words among rare ones, all out of the haystack, and ask for the common ones.

    A common word stands ten times as often as a rare one; rare words are repeated only where the haystack has too
    few, and common ones never fill more than about half of the list. After RULER's common word extraction
    (arXiv 2404.06654, section 3) without its worked example and without numbered entries. The answers are
    everywhere in the context, so ``depth`` is ``None``. Raises ``ValueError`` for a haystack of too few words.
    """
    vocabulary = setting.haystack.words
    order = rng.sample(vocabulary, len(vocabulary))
    common: list[str] = []
    for word in order:
        # A rare word that contains a common one would score as that common one.
        if len(common) < words and not any(word in other for other in vocabulary if other != word):
            common.append(word)
    if not 1 <= words <= min(len(common), len(vocabulary) // 10):
        raise ValueError(
            f"common_words(words={words}): expected at least 1 and ten times as many words in the haystack; "
            f"{setting.haystack.name!r} has {len(vocabulary)} of 4 to 9 letters: ask for fewer or use a longer text"
        )
    rare = [word for word in order if word not in common]
    entries = ceil(setting.longest_prompt / (setting.count(", ".join(order[:100])) / 100))
    repeats = ceil(entries / len(rare))
    often = max(repeats + 2, min(OFTEN * repeats, entries // (2 * words)))
    shuffle_seed = rng.getrandbits(64)

    def context(units: int) -> str:
        listed = common * often + [rare[i // repeats % len(rare)] for i in range(units)]
        Random(shuffle_seed).shuffle(listed)
        return f"{INTRODUCTION}\n\n{', '.join(listed)}\n\n"

    return Draft(
        context=context,
        question=f"Question: Which {words} words stand most often in the list above?\n",
        answer_prefix=f"The {words} most common words are:",
        answers=tuple(common),
        depth=None,
    )
