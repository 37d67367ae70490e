"""Wall time of a piece of work, the device's queue included, and of two in turns, so that noise disturbs both alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

Work = Callable[[], object]


@dataclass
class Elapsed:
    seconds: float = 0.0


@contextmanager
def timed(device: torch.device) -> Iterator[Elapsed]:
    """Times the block; on a GPU from an empty queue to an empty queue."""
    elapsed = Elapsed()
    _wait(device)
    start = time.perf_counter()
    yield elapsed
    _wait(device)
    elapsed.seconds = time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Paired:
    """`ratios` are own time / other's time of each round; `ratio` is their median, `low` and `high` the quartiles.

    The times are medians over rounds.
    """

    ratios: list[float]
    own_ms: float
    other_ms: float

    @property
    def rounds(self) -> int:
        return len(self.ratios)

    @property
    def ratio(self) -> float:
        return quartiles(self.ratios)[1]

    @property
    def low(self) -> float:
        return quartiles(self.ratios)[0]

    @property
    def high(self) -> float:
        return quartiles(self.ratios)[2]


def paired(
    own: Work,
    other: Work,
    device: torch.device,
    rounds: int = 15,
    warm: int = 2,
    around_own: AbstractContextManager[object] | None = None,
) -> Paired:
    """Runs `own` and `other` in turns, each round in the other order, and compares within the round.

    `own` runs inside `around_own`, whose entering and leaving is not timed.
    """
    times: dict[str, list[float]] = {"own": [], "other": []}

    def once(name: str) -> None:
        with around_own if name == "own" and around_own is not None else nullcontext(), timed(device) as elapsed:
            (own if name == "own" else other)()
        times[name].append(elapsed.seconds * 1000)

    for turn in range(warm + rounds):
        for name in ("own", "other") if turn % 2 else ("other", "own"):
            once(name)
    mine, theirs = times["own"][warm:], times["other"][warm:]
    ratios = [first / second for first, second in zip(mine, theirs, strict=True)]
    return Paired(ratios, statistics.median(mine), statistics.median(theirs))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile, interpolated; one value is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
