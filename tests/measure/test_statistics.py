import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.measure.statistics import PairedDifference, TooFewSamples, paired_by_sample, paired_difference

FINITE = st.floats(-100, 100)
PAIRS = st.lists(st.tuples(FINITE, FINITE), min_size=8, max_size=40)


def difference(values: list[float], baseline: list[float], **settings: object) -> PairedDifference:
    result = paired_difference(values, baseline, **settings)  # type: ignore[arg-type]
    assert isinstance(result, PairedDifference)
    return result


def skewed(n: int = 40) -> tuple[list[float], list[float]]:
    generator = np.random.default_rng(5)
    baseline = generator.normal(size=n)
    return list(baseline + generator.exponential(size=n) - 0.6), list(baseline)


@pytest.mark.parametrize(("interval", "theirs"), [("percentile", "percentile"), ("bca", "BCa")])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_the_interval_is_that_of_scipy(interval: str, theirs: str, confidence: float) -> None:
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    values, baseline = skewed()
    ours = difference(values, baseline, interval=interval, confidence=confidence, resamples=20_000)
    paired = stats.bootstrap(
        (np.array(values), np.array(baseline)),
        lambda a, b, axis=-1: (a - b).mean(axis=axis),
        paired=True,
        vectorized=True,
        method=theirs,
        confidence_level=confidence,
        n_resamples=20_000,
        rng=np.random.default_rng(99),
    ).confidence_interval
    # Two independent bootstraps of 20,000 resamples: ends agree to a few hundredths of the interval.
    assert ours.low == pytest.approx(paired.low, abs=0.03 * (paired.high - paired.low))
    assert ours.high == pytest.approx(paired.high, abs=0.03 * (paired.high - paired.low))


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    covered = 0
    for seed in range(200):
        values = generator.normal(loc=0.3, size=30)
        result = difference(list(values), [0.0] * 30, resamples=400, seed=seed)
        covered += result.low <= 0.3 <= result.high
    # 0.95 +- 4 standard errors of 200 trials, less the few per cent a percentile interval lacks at n=30.
    assert 0.86 <= covered / 200 <= 1


@given(PAIRS, st.booleans())
def test_counts_and_mean_are_those_of_the_differences(pairs: list[tuple[float, float]], higher: bool) -> None:
    values, baseline = [a for a, _ in pairs], [b for _, b in pairs]
    result = difference(values, baseline, higher_is_better=higher, resamples=200)
    above = sum(a > b for a, b in pairs)
    below = sum(a < b for a, b in pairs)
    assert (result.wins, result.losses) == ((above, below) if higher else (below, above))
    assert result.ties == sum(a == b for a, b in pairs)
    assert result.n == len(pairs) == result.wins + result.ties + result.losses
    assert result.mean == pytest.approx(np.mean(values) - np.mean(baseline), abs=1e-9)
    gaps = [a - b for a, b in pairs]
    assert min(gaps) - 1e-9 <= result.low <= result.high <= max(gaps) + 1e-9


@given(PAIRS)
def test_swapping_the_sides_mirrors_the_result(pairs: list[tuple[float, float]]) -> None:
    values, baseline = [a for a, _ in pairs], [b for _, b in pairs]
    one, other = difference(values, baseline, resamples=200), difference(baseline, values, resamples=200)
    assert (one.wins, one.losses) == (other.losses, other.wins)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low), abs=1e-9)


def test_a_seed_repeats_the_interval_and_another_moves_it() -> None:
    values, baseline = skewed()
    assert difference(values, baseline, seed=3) == difference(values, baseline, seed=3)
    assert difference(values, baseline, seed=3).low != difference(values, baseline, seed=4).low


@pytest.mark.parametrize("interval", ["percentile", "bca"])
def test_equal_differences_have_an_interval_of_width_zero(interval: str) -> None:
    result = difference([2.0] * 10, [1.5] * 10, interval=interval)
    assert (result.mean, result.low, result.high) == (0.5, 0.5, 0.5)
    assert result.verdict == "better"
    same = difference([1.0] * 10, [1.0] * 10, interval=interval)
    assert (same.verdict, same.ties) == ("undecided", 10)


def test_the_verdict_knows_which_way_is_better() -> None:
    values, baseline = [3.0 + i % 2 for i in range(20)], [1.0] * 20
    assert difference(values, baseline).verdict == "better"
    assert difference(values, baseline, higher_is_better=False).verdict == "worse"
    assert difference(baseline, values, higher_is_better=False).verdict == "better"
    assert difference([1.0, -1.0] * 10, [0.0] * 20).verdict == "undecided"


def test_small_differences_can_count_as_ties() -> None:
    result = difference([0.1, -0.1, 0.1, -0.1, 1.0, 1.0, -1.0, 0.0], [0.0] * 8, tie=0.2)
    assert (result.wins, result.ties, result.losses) == (2, 5, 1)


@pytest.mark.parametrize("n", [0, 3, 7])
def test_few_samples_are_refused_not_ranked(n: int) -> None:
    result = paired_difference([1.0] * n, [0.0] * n)
    assert result == TooFewSamples(n, 8)
    assert str(result) == f"n={n} is too few to rank, needs at least 8"
    assert isinstance(paired_difference([1.0] * 8, [0.0] * 8), PairedDifference)


def test_samples_are_matched_by_name_and_one_sided_ones_named() -> None:
    values = {"c": 3.0, "a": 1.0, "new": 9.0}
    baseline = {"a": 0.5, "b": 7.0, "c": 2.5}
    assert paired_by_sample(values, baseline) == ([1.0, 3.0], [0.5, 2.5], ["b", "new"])


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="2 values against 3 of the baseline"):
        paired_difference([1.0, 2.0], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"sample 1 has value nan and baseline 2\.0: expected finite numbers"):
        paired_difference([1.0, float("nan")], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"confidence=1\.5"):
        paired_difference([1.0], [1.0], confidence=1.5)
    with pytest.raises(ValueError, match="interval='BCa': expected 'percentile' or 'bca'"):
        paired_difference([1.0], [1.0], interval="BCa")  # type: ignore[arg-type]


def test_the_text_says_everything() -> None:
    result = difference([1.0] * 6 + [0.0] * 2, [0.5] * 8)
    assert str(result).startswith("+0.25 [")
    assert str(result).endswith("(n=8, 95% interval, 6 wins, 0 ties, 2 losses)")
