"""Scores of generated answers, from 0 to 1, as the field computes them."""

import re
import string
from collections.abc import Sequence


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction equals one of the answers after SQuAD's normalisation, else 0.

    Case, punctuation, the articles a, an, the, and the amount of white space do not count
    (arXiv 1606.05250, section 6.1).
    """
    return float(normalise(prediction) in {normalise(answer) for answer in answers})


def contains(prediction: str, answer: str) -> float:
    """1 if the answer stands in the prediction, case ignored, else 0."""
    return float(answer.lower() in clean(prediction).lower())


def recall(prediction: str, answers: Sequence[str]) -> float:
    """The part of the answers that stand in the prediction, in any order. Raises ``ValueError`` for no answers."""
    require_answers(answers)
    return sum(contains(prediction, answer) for answer in answers) / len(answers)


def any_contained(prediction: str, answers: Sequence[str]) -> float:
    """1 if at least one of the answers stands in the prediction. Raises ``ValueError`` for no answers."""
    require_answers(answers)
    return max(contains(prediction, answer) for answer in answers)


def string_match_all(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """RULER's main score: the mean over samples of ``recall`` (arXiv 2404.06654), not times 100."""
    require_pairs(predictions, references)
    return sum(map(recall, predictions, references)) / len(predictions)


def string_match_part(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """RULER's score for questions with alternative answers: the mean of ``any_contained``, not times 100.

    lm-eval 0.4.13 has a function of this name that takes the best sample's recall instead; this is RULER's own.
    """
    require_pairs(predictions, references)
    return sum(map(any_contained, predictions, references)) / len(predictions)


def clean(prediction: str) -> str:
    """The prediction without surrounding white space, control characters made line breaks, as RULER does it."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


def normalise(text: str) -> str:
    """SQuAD's normal form of an answer."""
    lowered = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", lowered).split())


def require_answers(answers: Sequence[str]) -> None:
    """A lone string would be taken letter by letter, and no answers for a full score."""
    if isinstance(answers, str) or not answers:
        raise ValueError(f"answers={answers!r}: expected a list of at least one text")


def require_pairs(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """One list of answers for every prediction, and at least one of both."""
    if not predictions or len(predictions) != len(references):
        raise ValueError(
            f"{len(predictions)} predictions and {len(references)} lists of answers: expected as many of both, "
            f"at least one"
        )
