import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.evals.scoring import any_contained, contains, exact_match, recall, string_match_all, string_match_part

WORDS = st.text(alphabet="abC -\n\t", min_size=1, max_size=4)


@given(st.lists(st.tuples(st.text("abC -\n\t", max_size=20), st.lists(WORDS, min_size=1, max_size=4)), min_size=1))
def test_string_match_all_equals_the_function_of_lm_eval(samples: list[tuple[str, list[str]]]) -> None:
    ruler = pytest.importorskip("lm_eval.tasks.ruler.common_utils", reason="lm-eval is not installed")
    predictions = [prediction for prediction, _ in samples]
    references = [answers for _, answers in samples]
    theirs = ruler.string_match_all(ruler.postprocess_pred(predictions), references)
    assert string_match_all(predictions, references) == pytest.approx(theirs, abs=1e-12)


def test_part_counts_a_sample_with_any_answer_and_all_the_share_of_answers() -> None:
    predictions = ["it is Paris, or LYON", "no idea", "Rome"]
    references = [["paris", "lyon", "nice", "lille"], ["oslo"], ["rome", "milan"]]
    assert string_match_all(predictions, references) == pytest.approx((2 / 4 + 0 + 1 / 2) / 3)
    assert string_match_part(predictions, references) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("The Eiffel Tower!", ["eiffel tower"], 1),
        (" 1234567.", ["1234567"], 1),
        ("it is 1234567", ["1234567"], 0),
        ("12345678", ["1234567"], 0),
        ("an  apple", ["pear", "Apple"], 1),
        ("theatre", ["atre"], 0),
    ],
)
def test_exact_match_ignores_what_squad_ignores(prediction: str, answers: list[str], expected: float) -> None:
    assert exact_match(prediction, answers) == expected


def test_contained_answers() -> None:
    assert contains("The number is\x00 1234567, I think", "1234567") == 1
    assert contains("7654321", "1234567") == 0
    assert recall("DELTA and alpha", ["alpha", "beta", "gamma", "delta"]) == 0.5
    assert any_contained("only beta", ["alpha", "beta"]) == 1
    assert any_contained("nothing", ["alpha", "beta"]) == 0


def test_no_answers_and_unpaired_lists_are_refused() -> None:
    with pytest.raises(ValueError, match=r"answers=\[\]: expected a list of at least one text"):
        recall("x", [])
    with pytest.raises(ValueError, match="answers='abc': expected a list"):
        any_contained("abc", "abc")
    with pytest.raises(ValueError, match="1 predictions and 2 lists of answers"):
        string_match_all(["x"], [["x"], ["y"]])
    with pytest.raises(ValueError, match="at least one"):
        string_match_part([], [])
