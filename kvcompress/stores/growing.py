"""A tensor that grows along its third dimension: amortised appends, bounded spare, copy on write."""

from weakref import WeakSet

import torch
from torch import Tensor

from kvcompress.kernels import choose


class Growing:
    """`[B, H, S, ...]` with room behind S. Every in-place write first makes sure that nobody else reads the memory."""

    def __init__(self, filled: Tensor, floor: int = 64) -> None:
        self.buffer = filled
        self.floor = floor
        self.begin = 0
        self.used = filled.shape[2]
        self._overlapping = False  # rows are the same memory after a fork into a batch
        self._owners: WeakSet[Growing] = WeakSet([self])

    @classmethod
    def like(cls, rows: Tensor, floor: int = 64) -> "Growing":
        """An empty one for rows such as `rows` [B, H, T, ...]."""
        return cls(rows.new_zeros(*rows.shape[:2], 0, *rows.shape[3:]), floor)

    def spare_for(self, length: int) -> int:
        """How many slots may lie unused behind `length` used ones: 12.5 % or `floor`, whichever is more."""
        return max(self.floor, length // 8)

    @property
    def view(self) -> Tensor:
        return self.buffer.narrow(2, self.begin, self.used)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all rows and heads that have memory of their own."""
        return self.buffer.untyped_storage().nbytes() // max(1, self.buffer.shape[2])

    @property
    def spare(self) -> int:
        return self.buffer.shape[2] - self.used

    def fork(self, copies: int = 1) -> "Growing":
        """The same memory for another owner, every row `copies` times."""
        other = object.__new__(Growing)
        other.buffer, other.begin, other.used, other.floor = self.buffer, self.begin, self.used, self.floor
        other._overlapping = self._overlapping or copies > 1
        other._owners = self._owners
        other._owners.add(other)
        if copies > 1:
            if self.buffer.shape[0] == 1:
                other.buffer = self.buffer.expand(copies, *self.buffer.shape[1:])
            else:
                other._adopt(self.view.repeat_interleave(copies, 0))
        return other

    def writable(self) -> Tensor:
        """The view, safe to write in place."""
        if self._shared:
            self._adopt(self._moved_to_new(self.used))
        return self.view

    def append(self, new: Tensor, lengths: list[int], counts: list[int]) -> None:
        """Puts the last `counts[b]` of `new[b]` [H, T, ...] behind the first `lengths[b]` slots of row b."""
        columns, first = new.shape[2], lengths[0]
        if lengths.count(first) == len(lengths) and counts.count(columns) == len(counts):
            self.reserve(first + columns)
            self.buffer.narrow(2, self.begin + first, columns).copy_(new)
            return
        self.reserve(max(length + count for length, count in zip(lengths, counts, strict=True)))
        target = self.view
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            target[row, :, length : length + count] = new[row, :, columns - count :]

    def reserve(self, total: int) -> None:
        """Makes `total` slots used and writable, at least those that are; what lies in new ones is finite."""
        if total < self.used:
            total = self.used
        if self._shared or self.begin + total > self.buffer.shape[2]:
            self._adopt(self._moved_to_new(total + self.spare_for(total) // 2))
        self.used = total

    def gather(self, index: Tensor, first: int = 0, ascending: bool = True) -> None:
        """Keeps slots `index` [B, H or 1, K], in that order; slots before `first` are known to stay where they are."""
        kept = index.shape[2]
        stays = not self._shared and self.buffer.shape[2] - kept <= self.spare_for(kept)
        if not (stays and ascending and choose.evict_in_place(self.view, index, first)):
            index = index[:, :, first:]
            index = index.reshape(*index.shape, *[1] * (self.buffer.dim() - 3))
            index = index.expand(self.buffer.shape[0], self.buffer.shape[1], -1, *self.buffer.shape[3:])
            moved = self.view.gather(2, index)
            if stays:
                self.view[:, :, first:kept] = moved
            else:
                fresh = self._new(kept + self.spare_for(kept) // 2)
                fresh[:, :, :first] = self.view[:, :, :first]
                fresh[:, :, first:kept] = moved
                self._adopt(fresh)
        self.used = kept

    def drop_middle(self, first: int, count: int) -> None:
        """Drops slots [first, first + count) of every row by moving the `first` slots before them."""
        left = self.used - count
        if self._shared or self.buffer.shape[2] - left > self.spare_for(left):
            fresh = self._new(left + self.spare_for(left) // 2)
            fresh[:, :, :first], fresh[:, :, first:left] = self.view[:, :, :first], self.view[:, :, first + count :]
            self._adopt(fresh)
        else:
            if first:
                self.view[:, :, count : count + first] = self.view[:, :, :first].clone()
            self.begin += count
        self.used = left

    def select_rows(self, index: Tensor, used: int | None = None) -> None:
        """Keeps rows `index` [B'] in that order, and of their slots the first `used`."""
        self.used = self.used if used is None else used
        if self.buffer.stride(0) == 0 and self.buffer.shape[0] > 1:  # all rows are the same memory
            self.buffer = self.buffer[:1].expand(len(index), *self.buffer.shape[1:])
            return
        self._adopt(self.view.index_select(0, index))

    @property
    def is_shared(self) -> bool:
        """Whether another owner holds the same memory."""
        return len(self._owners) > 1

    @property
    def is_read_elsewhere(self) -> bool:
        """Whether an append would have to copy what is stored, since others read the same memory."""
        return self._overlapping or len(self._owners) > 1

    @property
    def _shared(self) -> bool:
        if self.is_read_elsewhere:
            return True
        # What was made under inference_mode cannot be written outside of it.
        return self.buffer.is_inference() and not torch.is_inference_mode_enabled()

    def _new(self, capacity: int) -> Tensor:
        return self.buffer.new_zeros(*self.buffer.shape[:2], capacity, *self.buffer.shape[3:])

    def _moved_to_new(self, capacity: int) -> Tensor:
        fresh = self._new(capacity)
        fresh[:, :, : self.used] = self.view
        return fresh

    def _adopt(self, buffer: Tensor) -> None:
        self._owners.discard(self)
        self._owners = WeakSet([self])
        self.buffer, self.begin, self._overlapping = buffer, 0, False
