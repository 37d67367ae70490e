"""Differences of each method to exact, paired document by document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcompress.evals.results import EvalResult
from kvcompress.measure.statistics import PairedDifference, TooFewSamples, paired_by_sample, paired_difference


@dataclass(frozen=True)
class Comparison:
    """A method against exact on one task. `difference` is a text where there can be none, saying why.

    `left_out` are documents that only one side has a score of.
    """

    task: str
    method: str
    score: str
    difference: PairedDifference | TooFewSamples | str
    left_out: list[int]

    def to_dict(self) -> dict[str, Any]:
        """As plain values: the numbers, or `refused` with the reason."""
        head = {"task": self.task, "method": self.method, "score": self.score, "left_out": self.left_out}
        found = self.difference
        if not isinstance(found, PairedDifference):
            return {**head, "refused": str(found)}
        return {
            **head,
            "n": found.n,
            "mean": found.mean,
            "low": found.low,
            "high": found.high,
            "confidence": found.confidence,
            "wins": found.wins,
            "ties": found.ties,
            "losses": found.losses,
            "verdict": found.verdict,
        }


def compare_to_exact(results: Sequence[EvalResult]) -> list[Comparison]:
    """Every method but exact against exact on the same task, in the order of `results`. Empty without exact."""
    exact = {result.task: result for result in results if result.method == "exact"}
    return [
        _compare(result, exact[result.task]) for result in results if result.method != "exact" and result.task in exact
    ]


def _compare(result: EvalResult, exact: EvalResult) -> Comparison:
    score = result.sample_score or exact.sample_score or result.metric or exact.metric or ""
    for side in (exact, result):
        if side.status != "ok":
            return Comparison(result.task, result.method, score, f"{side.method} failed: {side.error}", [])
    values, baseline, left_out = paired_by_sample(_scores(result), _scores(exact))
    if not values:
        return Comparison(
            result.task, result.method, score, "the metric gives no number for a single document", left_out
        )
    # Log-likelihoods are better when higher, whatever the metric made of them is.
    higher = result.sample_score is not None or result.higher_is_better is not False
    difference = paired_difference(values, baseline, higher_is_better=higher)
    return Comparison(result.task, result.method, score, difference, left_out)


def _scores(result: EvalResult) -> dict[int, float]:
    return {sample.doc_id: sample.score for sample in result.samples if sample.score is not None}
