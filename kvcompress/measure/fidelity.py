"""How far a method's greedy tokens follow those of the exact cache, without any task."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RougeL:
    """ROUGE-L of two token sequences; see ``rouge_l``."""

    precision: float
    recall: float
    f_measure: float


@dataclass(frozen=True)
class Fidelity:
    """How alike a generated sequence is to the reference; see ``compare``.

    ``exact_match_length`` is in tokens; ``first_divergence`` is the index of the first differing token, or
    ``None`` if there is none.
    """

    exact_match_length: int
    first_divergence: int | None
    rouge_l: RougeL


def compare(reference: Sequence[int], candidate: Sequence[int]) -> Fidelity:
    """Compare the new tokens of two generations from one prompt, the reference being the exact cache's."""
    return Fidelity(
        exact_match_length(reference, candidate),
        first_divergence(reference, candidate),
        rouge_l(reference, candidate),
    )


def exact_match_length(reference: Sequence[int], candidate: Sequence[int]) -> int:
    """The number of leading tokens that are equal."""
    for i, (expected, got) in enumerate(zip(reference, candidate, strict=False)):
        if expected != got:
            return i
    return min(len(reference), len(candidate))


def first_divergence(reference: Sequence[int], candidate: Sequence[int]) -> int | None:
    """The index of the first differing token, or ``None`` for equal sequences.

    If one sequence is the beginning of the other, they differ where the shorter one ends.
    """
    equal = exact_match_length(reference, candidate)
    return None if equal == len(reference) == len(candidate) else equal


def rouge_l(reference: Sequence[int], candidate: Sequence[int]) -> RougeL:
    """ROUGE-L on token ids: with L the length of the longest common subsequence,

    recall = L / len(reference), precision = L / len(candidate), and the F-measure is their harmonic mean (Lin 2004,
    "ROUGE: A Package for Automatic Evaluation of Summaries", section 3.1, with beta = 1). Deviations: tokens are
    the model's own, neither stemmed nor lower-cased; two empty sequences are equal and score 1.
    """
    if len(reference) == len(candidate) == 0:
        return RougeL(1.0, 1.0, 1.0)
    common = longest_common_subsequence(reference, candidate)
    if common == 0:
        return RougeL(0.0, 0.0, 0.0)
    precision, recall = common / len(candidate), common / len(reference)
    return RougeL(precision, recall, 2 * precision * recall / (precision + recall))


def longest_common_subsequence(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common subsequence, tokens in order but not necessarily adjacent.

    One row of the usual table is kept as the bits of an integer (Hyyrö 2004, "Bit-parallel LCS-length
    computation revisited"): a zero bit is a column at which the length grows.
    """
    positions: dict[int, int] = {}
    for i, token in enumerate(first):
        positions[token] = positions.get(token, 0) | 1 << i
    row = everything = (1 << len(first)) - 1
    for token in second:
        matches = row & positions.get(token, 0)
        row = (row + matches | row - matches) & everything
    return len(first) - row.bit_count()
