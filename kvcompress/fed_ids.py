"""The ids that a cache was fed: what its KV is the KV of, so that nobody has to be believed about it.

B rows, T columns of one call; padding may stand before the tokens of a row.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from kvcompress.errors import CacheError

MOST_WAITING = 1024  # what lies on a device before it is read


class FedIds:
    """Every row's ids in order, without padding, 4 bytes each in host memory.

    They are known up to the first call that is not described by its ids alone. Those of decoding steps on a GPU, and
    the beams' indices, wait there until somebody asks, so that no step waits for them.
    """

    def __init__(self, rows: Sequence[Sequence[int]], ended: bool = False) -> None:
        self._rows = [array("i", row) for row in rows]
        self._ended = ended
        self._waiting: list[tuple[Tensor, list[int] | None]] = []  # ids and counts, or an order of rows and None

    def add(self, ids: Tensor | None, counts: list[int], decoding: bool) -> None:
        """Of `ids` [B, T] the last `counts[b]` were fed to row b; None if the call is not known by its ids."""
        self._ended = self._ended or ids is None
        if self._ended or ids is None:
            return
        self._wait(ids, counts)
        if not decoding:
            self.read()

    def reorder(self, index: Tensor) -> None:
        """Row b goes on from what row `index[b]` was fed."""
        self._wait(index, None)

    def _wait(self, numbers: Tensor, counts: list[int] | None) -> None:
        self._waiting.append((numbers.to(torch.int32, copy=True), counts))
        if numbers.device.type == "cpu" or len(self._waiting) == MOST_WAITING:
            self.read()

    def read(self) -> None:
        """Brings what waits on a device to the host."""
        for numbers, counts in self._waiting:
            if counts is None:
                self._rows = [self._rows[row][:] for row in numbers.tolist()]
                continue
            for row, new, count in zip(self._rows, numbers.cpu().numpy(), counts, strict=True):
                row.frombytes(new[len(new) - count :].tobytes())
        self._waiting = []

    @property
    def rows(self) -> list[array[int]]:
        """What is known of each row."""
        self.read()
        return self._rows

    def select(self, index: Sequence[int]) -> FedIds:
        """A copy with the rows `index`."""
        rows = self.rows
        return FedIds([rows[row] for row in index], self._ended)

    def check(self, row: int, tokens: Sequence[int]) -> None:
        """Raises CacheError unless `tokens` are the first ids that row `row` was fed."""
        fed = self.rows[row]
        for position, (known, given) in enumerate(zip(fed, tokens, strict=False)):
            if known != given:
                raise CacheError(
                    f"row {row} of this cache was fed id {known} at position {position}, but the given ids have "
                    f"{given} there; give the ids that it was fed, or the first of them"
                )
        if len(tokens) > len(fed):
            raise CacheError(
                f"of row {row} only the first {len(fed)} ids are known, but {len(tokens)} were given: what followed "
                "was fed as inputs_embeds, or beside other tensors that change its KV; give no more than these"
            )
