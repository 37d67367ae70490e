"""Wall time of a piece of work, the device's queue included."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


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
