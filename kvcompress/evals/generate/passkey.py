"""Passkey: one number in endless repeated noise, the easiest of the retrieval tasks."""

from random import Random

from kvcompress.evals.generate.draft import Draft, Setting, digits, unused
from kvcompress.evals.haystack import hide

INTRODUCTION = "A pass key is hidden in the text below. Find it and remember it; you will be asked for it."


def passkey(rng: Random, setting: Setting, depth: float) -> Draft:
    """Hide a number of five digits at ``depth``, said twice, and ask for it.

    After the passkey task of "Landmark Attention" (arXiv 2305.16300, section 4.2), with wording of our own.
    """
    number = unused(lambda: digits(rng, 5), setting.haystack, set())
    hidden = f"The pass key is {number}. Keep it in mind: {number} is the pass key."
    start = rng.randrange(len(setting.haystack.sentences))
    return Draft(
        context=lambda units: f"{INTRODUCTION}\n\n{hide(setting.haystack.take(start, units), [(depth, hidden)])}\n\n",
        question="Question: What is the pass key hidden in the text above?\n",
        answer_prefix="The pass key is",
        answers=(number,),
        depth=depth,
    )
