import hashlib
import pydoc_data.topics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.evals.haystack import FILLER, LONGEST_SENTENCE, hide, load_haystack, split_sentences


def test_the_built_in_text_is_the_python_documentation_in_the_order_of_its_keys() -> None:
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[key] for key in sorted(topics))
    haystack = load_haystack("python-docs")
    assert haystack.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert haystack.text.replace(" ", "") == "".join(text.split())
    assert max(map(len, haystack.sentences)) <= LONGEST_SENTENCE
    assert haystack.words == tuple(sorted(haystack.words))
    assert {"statement", "object"} < set(haystack.words)


@given(st.text(alphabet="ab.!? \n\t", max_size=200), st.integers(0, 3))
def test_sentences_joined_are_the_text_and_end_only_at_full_stops(text: str, long_words: int) -> None:
    text += " word" * 300 * long_words
    sentences = split_sentences(text)
    assert " ".join(sentences) == " ".join(text.split())
    for sentence in sentences:
        assert 0 < len(sentence) <= LONGEST_SENTENCE
        assert not any(mark + " " in sentence for mark in ".!?")


def test_a_run_without_spaces_is_cut_at_the_limit() -> None:
    assert list(map(len, split_sentences("x" * 1000))) == [400, 400, 200]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=30),
    st.lists(st.floats(0, 1), min_size=1, max_size=5),
)
def test_a_needle_stands_at_the_boundary_nearest_to_its_depth(lengths: list[int], depths: list[float]) -> None:
    sentences = ["x" * length for length in lengths]
    needles = [(depth, f"N{i}") for i, depth in enumerate(depths)]
    parts = hide(sentences, needles).split(" ")
    assert [part for part in parts if part[0] == "x"] == sentences
    total = sum(lengths)
    boundaries = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    order: list[float] = []
    for i, part in enumerate(parts):
        if part[0] == "N":
            depth = depths[int(part[1:])]
            order.append(depth)
            before = sum(len(other) for other in parts[:i] if other[0] == "x")
            assert abs(before - depth * total) <= min(abs(b - depth * total) for b in boundaries) + 1e-9
    assert order == sorted(depths)


def test_behind_its_end_the_haystack_begins_again() -> None:
    haystack = load_haystack("filler")
    assert haystack.take(3, 6) == [FILLER[3], *FILLER, FILLER[0]]


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text(" \n\n")
    with pytest.raises(ValueError, match=r"empty\.txt' has no text in it"):
        load_haystack(str(path))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="python-doc"):
        load_haystack("python-dox")
