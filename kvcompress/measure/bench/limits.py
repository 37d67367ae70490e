"""How fast this machine computes and reads: what no kernel can beat."""

from __future__ import annotations

import statistics

import torch

from kvcompress.measure.speed import timed


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
