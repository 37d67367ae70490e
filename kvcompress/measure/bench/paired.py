"""Two things timed in turns, so that a noisy machine disturbs both alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from kvcompress.measure.speed import timed

Work = Callable[[], object]


@dataclass(frozen=True)
class Paired:
    """`ratio` is the median over rounds of own time / other's time; `low` and `high` are the quartiles."""

    ratio: float
    low: float
    high: float
    own_ms: float
    other_ms: float
    rounds: int


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
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if rounds > 1 else ratios * 3
    return Paired(middle, low, high, statistics.median(mine), statistics.median(theirs), rounds)


def multiply_add_seconds(device: torch.device, size: int = 2048) -> float:
    """Seconds of one of the fp32 multiply-adds of a product of two square matrices."""
    left, right = torch.ones(size, size, device=device), torch.ones(size, size, device=device)
    times = []
    for _ in range(7):
        with timed(device) as elapsed:
            torch.mm(left, right)
        times.append(elapsed.seconds)
    return min(times) / size**3


def read_seconds(device: torch.device, nbytes: int) -> float:
    """Seconds that a plain sum over `nbytes` takes, read again and again: the limit for whatever must read as much."""
    source = torch.ones(nbytes // 4, device=device)
    times = []
    for _ in range(15):
        with timed(device) as elapsed:
            source.sum()
        times.append(elapsed.seconds)
    return statistics.median(times)
