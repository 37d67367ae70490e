"""What each row of a cache stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcompress.cache import CompressedCache
from kvcompress.measure.stored import evicted_rows


@dataclass(frozen=True)
class StoredKV:
    """Bytes of one row, spare apart, and of the exact baseline for the same tokens, in its own dtype and at 16 bits."""

    nbytes: int
    exact_nbytes: int
    exact_nbytes_16bit: int


def stored_kv(cache: CompressedCache) -> list[StoredKV]:
    """What every row of `cache` would store if it were alone, measured on a copy of that row."""
    itemsize = max(layer.shape.itemsize for layer in cache.layers if layer.shape is not None)
    evicted = evicted_rows(cache)
    measured = []
    for row in range(cache.rows):
        alone = cache if cache.rows == 1 else take_rows(cache, [row])
        exact, sizes = alone.exact_nbytes, alone.memory()
        # Another row may have made the batch store positions that this one does without.
        needless = sizes["spare"] + (0 if evicted[row] else sizes["positions"])
        measured.append(StoredKV(alone.nbytes - needless, exact, exact * 2 // itemsize))
    return measured


def take_rows(cache: CompressedCache, rows: Sequence[int]) -> CompressedCache:
    """A fork of `cache` with these of its rows, each as often as it is named; memory is shared where it can be."""
    if cache.rows == 1:
        return cache.fork(len(rows))
    fork = cache.fork()
    if list(rows) != list(range(cache.rows)):
        fork.reorder_cache(torch.tensor(rows))
    return fork
