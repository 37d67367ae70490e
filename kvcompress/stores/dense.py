"""Keys and values in the model's own dtype. Appends are amortised; an eviction gives its bytes back."""

from typing import Any

from torch import Tensor

from kvcompress.kernels.layout import DenseLayer
from kvcompress.stores.growing import Growing
from kvcompress.stores.slots import Slots, ends_mask, first_change, kept_index


class DenseStore(Slots):
    """`keys` and `values` [B, H, S, D] of one layer, every row left-aligned with a length of its own."""

    def __init__(self, rows: int, with_scores: bool = False) -> None:
        super().__init__(rows, with_scores)
        self._keys: Growing | None = None
        self._values: Growing | None = None

    @property
    def keys(self) -> Tensor:
        return self.filled[0].view

    @property
    def values(self) -> Tensor:
        return self.filled[1].view

    @property
    def filled(self) -> tuple[Growing, Growing]:
        if self._keys is None or self._values is None:
            raise ValueError("this layer holds no keys yet; feed the model at least one token first")
        return self._keys, self._values

    @property
    def empty(self) -> bool:
        return self._keys is None

    def append(self, keys: Tensor, values: Tensor, counts: list[int]) -> None:
        """Stores the last `counts[b]` columns of `keys` and `values` [B, H, T, D] behind row b."""
        if self._keys is None or self._values is None:
            self._keys, self._values = Growing.like(keys, self.floor), Growing.like(values, self.floor)
        self._keys.append(keys, self.lengths, counts)
        self._values.append(values, self.lengths, counts)
        self.grow(keys, counts)

    def logits(self, query: Tensor) -> Tensor:
        """`query` fp32 [B, H, M, D] times the keys: fp32 [B, H, M, S]."""
        return query @ self.keys.float().transpose(-1, -2)

    def mix(self, weights: Tensor) -> Tensor:
        """`weights` fp32 [B, H, M, S] times the values: fp32 [B, H, M, D]."""
        return weights @ self.values.float()

    def layout(self) -> DenseLayer:
        """All tensors as the kernels read them."""
        return DenseLayer(self.keys, self.values, self.lengths)

    def plain(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values [B, H, S, D]: here all are in full precision."""
        keys, values = self.filled
        return keys.view, values.view

    def key_prefix(self, count: int) -> list[tuple[slice, Tensor]]:
        """The first `count` keys as (rows, keys [B, H, count, D]), to be written in place (re-rotation)."""
        return [(slice(None), self.filled[0].writable()[:, :, :count])]

    def evict(self, keep: Tensor, counts: list[int] | None = None) -> None:
        """Keeps the slots in the mask `keep` [B, H or 1, S]: `counts[b]`, if it is known, in each head of row b."""
        index, counts = kept_index(keep, self.lengths, counts)
        if counts == self.lengths:
            return
        first = first_change(keep)
        self.position_table(keep.shape[1], keep.device)
        for column in self.columns().values():
            column.gather(index if column.buffer.shape[1] > 1 else index[:, :1], first)
        self.lengths = counts

    def evict_middle(self, first: list[int], last: list[int]) -> None:
        """Keeps the first `first[b]` and the last `last[b]` slots of each row; moves the first ones only, if it can."""
        rows = zip(self.lengths, first, last, strict=True)
        gone = [max(0, length - front - back) for length, front, back in rows]
        if not any(gone):
            return
        device = self.keys.device
        if not (self.uniform and len(set(gone)) == 1 and len(set(first)) == 1):
            left = [length - count for length, count in zip(self.lengths, gone, strict=True)]
            self.evict(ends_mask(self.lengths, first, last, device), left)
            return
        self.position_table(1, device)
        for column in self.columns().values():
            column.drop_middle(first[0], gone[0])
        self.lengths = [length - gone[0] for length in self.lengths]

    def columns(self) -> dict[str, Growing]:
        if self._keys is None or self._values is None:
            return {}
        return {"keys": self._keys, "values": self._values, **self.per_slot()}

    def memory(self) -> dict[str, int]:
        """Bytes by what they are; `holes` is what shorter rows of a batch leave unused, `spare` is room to grow."""
        sizes: dict[str, int] = dict.fromkeys(("keys", "values", "positions", "scores", "holes", "spare"), 0)
        slots = len(self.lengths) * self.length
        for name, column in self.columns().items():
            used = column.bytes_per_slot * column.used
            filled = used * sum(self.lengths) // max(1, slots)
            sizes[name] += filled
            sizes["holes"] += used - filled
            sizes["spare"] += column.buffer.untyped_storage().nbytes() - used
        return sizes

    def select_rows(self, index: list[int], on_device: Tensor) -> None:
        """Keeps rows `index` in that order; `on_device` is the same on the store's device."""
        longest = max(self.lengths[row] for row in index)
        for column in self.columns().values():
            column.select_rows(on_device, longest)
        self.select_counts(index)

    def fork(self, copies: int = 1) -> "DenseStore":
        other = DenseStore(0)
        other.copy_state(self, copies)
        other._keys = self._keys.fork(copies) if self._keys else None
        other._values = self._values.fork(copies) if self._values else None
        return other

    def tensors(self) -> dict[str, Tensor]:
        """The used part of every tensor, for `save`."""
        return {name: column.view for name, column in self.columns().items()}

    @classmethod
    def load(cls, state: dict[str, Any], tensors: dict[str, Tensor]) -> "DenseStore":
        """The store that `state()` and `tensors()` described."""
        store = cls(len(state["lengths"]), state["with_scores"])
        store.lengths, store.seen = list(state["lengths"]), list(state["seen"])
        columns = {name: Growing(tensor) for name, tensor in tensors.items()}
        store._keys, store._values = columns.get("keys"), columns.get("values")
        store.positions, store.scores = columns.get("positions"), columns.get("scores")
        return store
