"""How sure a difference to the baseline is: paired per sample, with a bootstrap interval."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

FEWEST_SAMPLES = 8

Sample = TypeVar("Sample", bound=Hashable)


@dataclass(frozen=True)
class TooFewSamples:
    """Says that the samples are too few for an interval, and so for a ranking."""

    n: int
    needed: int

    def __str__(self) -> str:
        return f"n={self.n} is too few to rank, needs at least {self.needed}"


@dataclass(frozen=True)
class PairedDifference:
    """The mean of ``value - baseline`` over ``n`` samples, with its bootstrap interval ``low`` to ``high``.

    ``wins``, ``ties`` and ``losses`` count the samples on which the value is better than, as good as and worse
    than the baseline.
    """

    n: int
    mean: float
    low: float
    high: float
    confidence: float
    wins: int
    ties: int
    losses: int
    higher_is_better: bool

    @property
    def verdict(self) -> Literal["better", "worse", "undecided"]:
        """Better or worse than the baseline if the interval leaves 0 out, else undecided."""
        if self.low <= 0 <= self.high:
            return "undecided"
        return "better" if (self.low > 0) == self.higher_is_better else "worse"

    def __str__(self) -> str:
        return (
            f"{self.mean:+.4g} [{self.low:+.4g}, {self.high:+.4g}] (n={self.n}, {self.confidence:.0%} interval, "
            f"{self.wins} wins, {self.ties} ties, {self.losses} losses)"
        )


def paired_difference(
    values: Sequence[float],
    baseline: Sequence[float],
    *,
    higher_is_better: bool = True,
    confidence: float = 0.95,
    resamples: int = 10_000,
    fewest: int = FEWEST_SAMPLES,
    tie: float = 0.0,
    interval: Literal["percentile", "bca"] = "percentile",
    seed: int = 0,
) -> PairedDifference | TooFewSamples:
    """Compare two scores of the same samples, ``values[i]`` and ``baseline[i]`` being those of sample ``i``.

    The interval is the bootstrap percentile interval of the mean difference (Efron and Tibshirani 1993,
    chapter 13), or with ``interval="bca"`` the bias-corrected and accelerated one (chapter 14), for which SciPy
    must be installed. Differences of at most ``tie`` in size are ties. Fewer samples than ``fewest`` give
    ``TooFewSamples`` and no numbers. The same seed gives the same interval. Raises ``ValueError`` for unequal
    lengths, values that are not finite, and settings out of range.
    """
    if len(values) != len(baseline):
        raise ValueError(
            f"{len(values)} values against {len(baseline)} of the baseline: expected one of each per sample; "
            f"use paired_by_sample to match them by name"
        )
    if not 0 < confidence < 1 or resamples < 1 or tie < 0 or fewest < 2:
        raise ValueError(
            f"confidence={confidence}, resamples={resamples}, tie={tie}, fewest={fewest}: expected a confidence "
            f"between 0 and 1, at least 1 resample, a tie of 0 or more and at least 2 samples"
        )
    if interval not in ("percentile", "bca"):
        raise ValueError(f"interval={interval!r}: expected 'percentile' or 'bca'")
    pairs = np.array([values, baseline], dtype=np.float64).reshape(2, -1)
    bad = np.flatnonzero(~np.isfinite(pairs).all(axis=0))
    if bad.size:
        value, base = pairs[:, bad[0]]
        raise ValueError(
            f"sample {bad[0]} has value {value} and baseline {base}: expected finite numbers; leave failed samples "
            f"out of both"
        )
    if len(values) < fewest:
        return TooFewSamples(len(values), fewest)
    differences = pairs[0] - pairs[1]
    low, high = bootstrap_interval(differences, confidence, resamples, interval, np.random.default_rng(seed))
    better = int((differences > tie).sum())
    worse = int((differences < -tie).sum())
    return PairedDifference(
        n=len(differences),
        mean=float(differences.mean()),
        low=low,
        high=high,
        confidence=confidence,
        wins=better if higher_is_better else worse,
        ties=len(differences) - better - worse,
        losses=worse if higher_is_better else better,
        higher_is_better=higher_is_better,
    )


def paired_by_sample(
    values: Mapping[Sample, float], baseline: Mapping[Sample, float]
) -> tuple[list[float], list[float], list[Sample]]:
    """Match two scores by sample: the values and the baseline of the samples in both, and the samples left out.

    The order is that of the baseline. A sample that only one side has (a failed run) is left out of both and
    named, never counted as a loss or a win.
    """
    both = [sample for sample in baseline if sample in values]
    left_out = [sample for sample in [*baseline, *values] if (sample in values) != (sample in baseline)]
    return [values[sample] for sample in both], [baseline[sample] for sample in both], left_out


def bootstrap_interval(
    differences: np.ndarray,  # [n]
    confidence: float,
    resamples: int,
    interval: Literal["percentile", "bca"],
    generator: np.random.Generator,
) -> tuple[float, float]:
    """The lower and upper end of the bootstrap interval of a mean."""
    if np.ptp(differences) == 0:
        # Every resample has this mean; the acceleration of BCa would be 0/0.
        return float(differences[0]), float(differences[0])
    if interval == "bca":
        try:
            from scipy.stats import bootstrap
        except ImportError:
            raise ValueError(
                "interval='bca' needs SciPy, which is not installed; install scipy or use 'percentile'"
            ) from None
        ends = bootstrap(
            (differences,),
            np.mean,
            confidence_level=confidence,
            n_resamples=resamples,
            batch=1000,
            method="BCa",
            rng=generator,
        ).confidence_interval
        return float(ends.low), float(ends.high)
    means = np.empty(resamples)
    for first in range(0, resamples, 1000):
        # Blocks bound the memory; the numbers drawn do not depend on their size.
        rows = min(1000, resamples - first)
        chosen = generator.integers(0, len(differences), size=(rows, len(differences)))
        means[first : first + rows] = differences[chosen].mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)
