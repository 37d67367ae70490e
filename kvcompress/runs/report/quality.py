"""Quality against stored bytes: what each method scored, how sure that is, and which methods none beats in both."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from kvcompress.evals.comparison import compare_to_exact
from kvcompress.evals.results import EvalResult
from kvcompress.measure.record import Record
from kvcompress.measure.statistics import FEWEST_SAMPLES, PairedDifference, TooFewSamples, paired_difference


@dataclass
class Point:
    """A method's mean stored bytes and quality, with the ends of its 95 % interval where there are samples enough."""

    method: str
    kv_bytes: float
    value: float
    low: float | None = None
    high: float | None = None
    difference: PairedDifference | TooFewSamples | str | None = None
    on_front: bool = False


@dataclass
class Comparison:
    """All methods under one measure. `left_out` says of each method that has too few samples to be ranked why."""

    measure: str
    higher_is_better: bool
    points: list[Point]
    exact: float | None
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def ranked(self) -> list[Point]:
        """The points of methods that have samples enough."""
        return [point for point in self.points if point.method not in self.left_out]


def family(method: str) -> str:
    """A method without its numbers, such as `snapkv | kivi`; methods of one family share a marker."""
    names = re.sub(r"\([^)]*\)", "", method)
    mode = re.search(r"positions=['\"](\w+)['\"]", method)
    return f"{names}, {mode[1]} positions" if mode else names


def perplexities(records: Sequence[Record]) -> Comparison:
    """Perplexity over all scored tokens; the interval is that of the paired difference in NLL to exact."""
    points, exact = [], None
    for method, group in by_method(records).items():
        nll, baseline = [_rounded(record.nll) for record in group], [_rounded(record.nll_exact) for record in group]
        base = fmean(baseline)
        exact = math.exp(base) if exact is None else exact
        point = Point(method, mean_bytes(group), math.exp(fmean(nll)))
        point.difference = paired_difference(nll, baseline, higher_is_better=False)
        if isinstance(point.difference, PairedDifference):
            point.low, point.high = (math.exp(base + end) for end in (point.difference.low, point.difference.high))
        points.append(point)
    return ranked(Comparison("perplexity", False, points, exact))


def divergences(records: Sequence[Record]) -> Comparison:
    """KL(exact || method) in nats, the mean over the scored tokens, then over samples."""
    points = []
    for method, group in by_method(records).items():
        values = [_rounded(record.kl) for record in group]
        point = Point(method, mean_bytes(group), fmean(values))
        point.difference = paired_difference(values, [0.0] * len(values), higher_is_better=False)
        if isinstance(point.difference, PairedDifference):
            point.low, point.high = point.difference.low, point.difference.high
        points.append(point)
    return ranked(Comparison("KL (nats)", False, points, 0.0))


def task_scores(results: Sequence[EvalResult]) -> Comparison:
    """One task under all methods; the interval is that of the paired difference to exact, put on exact's score."""
    differences = {each.method: each.difference for each in compare_to_exact(results)}
    exact = next((result.score for result in results if result.method == "exact" and result.status == "ok"), None)
    good = [result for result in results if result.status == "ok" and result.score is not None]
    points = []
    for result in good:
        if result.kv_bytes is None or result.score is None:
            continue
        point = Point(result.method, result.kv_bytes, result.score, difference=differences.get(result.method))
        found = point.difference
        if isinstance(found, PairedDifference) and exact is not None and result.sample_score is None:
            point.low, point.high = exact + found.low, exact + found.high
        if result.method == "exact" and len(result.samples) < FEWEST_SAMPLES:
            point.difference = TooFewSamples(len(result.samples), FEWEST_SAMPLES)
        points.append(point)
    measure = next((result.metric or "score" for result in good), "score")
    return ranked(Comparison(measure, good[0].higher_is_better is not False if good else True, points, exact))


def _rounded(nats: float | None) -> float:
    """To a millionth of a nat: what differs by less is the rounding of fp32, and neither better nor worse."""
    return round(nats or 0.0, 6) + 0.0  # -0.0 becomes 0.0


def ranked(comparison: Comparison) -> Comparison:
    """Marks the methods on the Pareto front of those that have samples enough, and says why others are left out."""
    comparison.left_out = {
        point.method: str(point.difference)
        for point in comparison.points
        if isinstance(point.difference, TooFewSamples)
    }
    sign = -1.0 if comparison.higher_is_better else 1.0
    for point in comparison.ranked:
        point.on_front = not any(
            other.kv_bytes <= point.kv_bytes
            and sign * other.value <= sign * point.value
            and (other.kv_bytes, other.value) != (point.kv_bytes, point.value)
            for other in comparison.ranked
        )
    return comparison


def by_method(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The measured samples of each method, in the order of the records."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.status == "ok":
            found.setdefault(record.method, []).append(record)
    return found


def mean_bytes(records: Sequence[Record]) -> float:
    """Mean stored bytes after prefill and compression."""
    return fmean(record.kv_bytes or 0 for record in records)
