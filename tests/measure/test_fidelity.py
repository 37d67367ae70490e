from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.measure.fidelity import (
    Fidelity,
    RougeL,
    compare,
    exact_match_length,
    first_divergence,
    longest_common_subsequence,
    rouge_l,
)

TOKENS = st.lists(st.integers(0, 6), max_size=40)


def by_definition(first: list[int], second: list[int]) -> int:
    """The longest common subsequence by its recursion."""

    @cache
    def length(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return 0
        if first[i - 1] == second[j - 1]:
            return length(i - 1, j - 1) + 1
        return max(length(i - 1, j), length(i, j - 1))

    return length(len(first), len(second))


@given(TOKENS, TOKENS)
def test_the_common_subsequence_follows_its_recursion(first: list[int], second: list[int]) -> None:
    assert longest_common_subsequence(first, second) == by_definition(first, second)


@given(TOKENS.filter(len), TOKENS.filter(len))
def test_rouge_l_equals_the_reference_package_on_token_ids(reference: list[int], candidate: list[int]) -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer", reason="rouge-score is not installed")

    class Split:
        def tokenize(self, text: str) -> list[str]:
            return text.split()

    theirs = scorer.RougeScorer(["rougeL"], tokenizer=Split()).score(
        " ".join(map(str, reference)), " ".join(map(str, candidate))
    )["rougeL"]
    ours = rouge_l(reference, candidate)
    assert (ours.precision, ours.recall, ours.f_measure) == pytest.approx(
        (theirs.precision, theirs.recall, theirs.fmeasure), abs=1e-12
    )


@given(TOKENS, TOKENS, TOKENS)
def test_sequences_agree_up_to_where_they_diverge(shared: list[int], first: list[int], second: list[int]) -> None:
    reference, candidate = shared + first, shared + second
    length = exact_match_length(reference, candidate)
    assert length >= len(shared)
    assert reference[:length] == candidate[:length]
    assert reference[length : length + 1] != candidate[length : length + 1] or reference == candidate
    assert first_divergence(reference, candidate) == (None if reference == candidate else length)


def test_one_sequence_cut_short_diverges_where_it_ends() -> None:
    assert compare([5, 6, 7, 8], [5, 6]) == Fidelity(2, 2, RougeL(1.0, 0.5, 2 / 3))
    assert compare([5, 6], [5, 6]) == Fidelity(2, None, RougeL(1.0, 1.0, 1.0))
    assert compare([5, 6], [7, 5]) == Fidelity(0, 0, RougeL(0.5, 0.5, 0.5))


def test_empty_sequences() -> None:
    assert compare([], []) == Fidelity(0, None, RougeL(1.0, 1.0, 1.0))
    assert compare([1], []) == Fidelity(0, 0, RougeL(0.0, 0.0, 0.0))


def test_thousands_of_tokens_are_compared() -> None:
    reference = [i * i % 997 for i in range(8000)]
    dropped = [token for i, token in enumerate(reference) if i % 10]
    assert longest_common_subsequence(reference, dropped) == 7200
