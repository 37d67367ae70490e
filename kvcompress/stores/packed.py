"""Keys and values as 2- or 4-bit codes, the newest in full precision (KIVI, arXiv 2402.02750)."""

from __future__ import annotations

from math import lcm
from typing import Any, Literal

import torch
from torch import Tensor

from kvcompress.kernels.attention.naive import packed_logits, packed_mix
from kvcompress.kernels.layout import LANES, PackedKeys, PackedLayer, PackedValues
from kvcompress.stores import holes
from kvcompress.stores.codes import PACKED_SPARE, Codes, runs_of_rows
from kvcompress.stores.dense import DenseStore
from kvcompress.stores.growing import Growing
from kvcompress.stores.slots import Slots, column, ends_mask


class PackedStore(Slots):
    """The slots of a row are, in order: `front` in full precision, packed codes, and the residual.

    Packed keys end before the residual keys and packed values before the residual values; the two ends differ. An
    evicted packed token leaves a hole (position -1) that is masked; bytes come back when every head of a row has a
    unit of nothing but holes (`unit` tokens: a group, and at least the 32 tokens of one block of words).
    """

    def __init__(
        self, rows: int, bits: int, group_size: int, residual: int, front: int = 0, with_scores: bool = False
    ) -> None:
        super().__init__(rows, with_scores)
        self.bits, self.group_size, self.residual, self.front_size = bits, group_size, residual, front
        self.unit = lcm(group_size, LANES)
        self.fronts = [0] * rows  # how many tokens of each row are in `front`: none, or `front_size` once it packs
        self.front: tuple[Growing, Growing] | None = None
        self.tail: tuple[Growing, Growing] | None = None
        self.keys = Codes(rows, "keys", bits, group_size)
        self.values = Codes(rows, "values", bits, group_size)
        self.has_holes = False
        self.floor = PACKED_SPARE
        self._may_free = False  # whether something was evicted since units were last freed

    def set_floor(self, tokens: int) -> None:
        super().set_floor(tokens)
        self.keys.floor = self.values.floor = tokens

    @property
    def empty(self) -> bool:
        return self.tail is None

    @property
    def filled(self) -> tuple[Growing, Growing]:
        """Keys and values that are not packed yet."""
        if self.tail is None:
            raise ValueError("this layer holds no keys yet; feed the model at least one token first")
        return self.tail

    def tail_lengths(self, codes: Codes) -> list[int]:
        rows = zip(self.lengths, self.fronts, codes.counts, strict=True)
        return [length - front - count for length, front, count in rows]

    def append(self, keys: Tensor, values: Tensor, counts: list[int]) -> None:
        """Stores the last `counts[b]` columns of `keys` and `values` [B, H, T, D] in full precision; `pack` packs."""
        if self.tail is None:
            self._choose_value_groups(values.shape[-1])
            self.tail = Growing.like(keys, self.floor), Growing.like(values, self.floor)
        self.tail[0].append(keys, self.tail_lengths(self.keys), counts)
        self.tail[1].append(values, self.tail_lengths(self.values), counts)
        self.grow(keys, counts)

    def _choose_value_groups(self, dim: int) -> None:
        self.values.group_size = min(self.group_size, dim)
        if dim % self.values.group_size:
            raise ValueError(
                f"kivi's group_size {self.group_size} does not divide the model's head dim {dim}; "
                f"choose a divisor of {dim}"
            )

    def logits(self, query: Tensor) -> Tensor:
        """`query` fp32 [B, H, M, D] times all keys: fp32 [B, H, M, S]; holes and row ends get values to be masked."""
        out = query.new_zeros(*query.shape[:3], self.length)
        for rows, (front, packed, length) in runs_of_rows(self.fronts, self.keys.counts, self.lengths):
            tail = front + packed
            if self.front and front:
                out[rows, ..., :front] = query[rows] @ self.front[0].view[rows].float().transpose(-1, -2)
            if packed:
                codes = self.keys.rows(rows)
                assert isinstance(codes, PackedKeys)
                out[rows, ..., front:tail] = packed_logits(query[rows], codes, packed)
            keys = self.filled[0].view[rows, :, : length - tail].float()
            out[rows, ..., tail:length] = query[rows] @ keys.transpose(-1, -2)
        return out

    def mix(self, weights: Tensor) -> Tensor:
        """`weights` fp32 [B, H, M, S] times all values: fp32 [B, H, M, D]."""
        out = weights.new_zeros(*weights.shape[:3], self.filled[1].buffer.shape[-1])
        for rows, (front, packed, length) in runs_of_rows(self.fronts, self.values.counts, self.lengths):
            tail = front + packed
            if self.front and front:
                out[rows] += weights[rows, ..., :front] @ self.front[1].view[rows].float()
            if packed:
                codes = self.values.rows(rows)
                assert isinstance(codes, PackedValues)
                out[rows] += packed_mix(weights[rows, ..., front:tail], codes, packed)
            values = self.filled[1].view[rows, :, : length - tail].float()
            out[rows] += weights[rows, ..., tail:length] @ values
        return out

    def layout(self) -> PackedLayer:
        """All tensors as the kernels read them."""
        front_keys, front_values = (None, None) if self.front is None else (column.view for column in self.front)
        keys, values = self.keys.packed, self.values.packed
        return PackedLayer(
            front_keys,
            front_values,
            self.fronts,
            keys if isinstance(keys, PackedKeys) else None,
            self.keys.counts,
            values if isinstance(values, PackedValues) else None,
            self.values.counts,
            self.filled[0].view,
            self.filled[1].view,
            self.lengths,
        )

    def plain(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values [B, H, S, D] as long as all of them are in full precision, else None."""
        if any(self.keys.counts) or any(self.values.counts) or any(self.fronts):
            return None
        return self.filled[0].view, self.filled[1].view

    def dequantised(self, which: Literal[0, 1]) -> Tensor:
        """All keys (0) or values (1) [B, H, S, D] in full precision; holes and row ends hold anything finite.

        A copy, as long as the context: for a method that decides from them, not for attention.
        """
        codes = (self.keys, self.values)[which]
        full = self.filled[which].buffer
        out = full.new_zeros(*full.shape[:2], self.length, full.shape[-1])
        for rows, (front, packed, length) in runs_of_rows(self.fronts, codes.counts, self.lengths):
            tail = front + packed
            if self.front and front:
                out[rows, :, :front] = self.front[which].view[rows]
            if packed:
                out[rows, :, front:tail] = codes.dequantised(rows, packed, full.shape[-1])
            out[rows, :, tail:length] = self.filled[which].view[rows, :, : length - tail]
        return out

    def key_prefix(self, count: int) -> list[tuple[slice, Tensor]]:
        """The first `count` keys as (rows, keys [B, H, count, D]), to be written in place; packed ones cannot be."""
        found = []
        for rows, (front, packed) in runs_of_rows(self.fronts, self.keys.counts):
            keys = self.front[0] if self.front and front else self.filled[0]
            if packed and count > front:
                raise ValueError(
                    f"only {front} of the first {count} keys are in full precision; packed ones do not rotate"
                )
            found.append((rows, keys.writable()[rows, :, :count]))
        return found

    def pack(self) -> None:
        """Packs what is due: keys in steps of `residual`, values up to the last `residual` (KIVI, algorithm 1).

        Then frees the units that an eviction left empty, those just packed among them.
        """
        self._split_front()
        # Until a row's front stands apart, its first tokens are not to be packed, nor are those behind them.
        ready = [front == self.front_size for front in self.fronts]
        alive = self.alive(self.filled[0].buffer.device) if self.has_holes else None
        for tail, codes in zip(self.filled, (self.keys, self.values), strict=True):
            lengths = self.tail_lengths(codes)
            if codes is self.keys:
                due = [length - length % self.residual for length in lengths]
            else:
                due = [max(0, length - self.residual) for length in lengths]
            due = [count if is_ready else 0 for count, is_ready in zip(due, ready, strict=True)]
            if any(due):
                present = None if alive is None else self._alive_tail(alive, codes, max(due))
                codes.append(tail.view, due, present)
                _drop_first(tail, due, lengths)
        if self._may_free:
            self.free_units()

    def _split_front(self) -> None:
        """Sets the first tokens of a row that is about to pack aside, in full precision."""
        enough = self.front_size + self.residual
        rows = zip(self.tail_lengths(self.keys), self.fronts, strict=True)
        due = [self.front_size if front < self.front_size and length >= enough else 0 for length, front in rows]
        if not any(due):
            return
        keys, values = (Growing(tail.view[:, :, : self.front_size].clone(), floor=0) for tail in self.filled)
        if self.front is None:
            self.front = keys, values
        else:
            for old, new in zip(self.front, (keys, values), strict=True):
                for row, count in enumerate(due):
                    old.writable()[row, :, :count] = new.view[row, :, :count]
        for tail, codes in zip(self.filled, (self.keys, self.values), strict=True):
            _drop_first(tail, due, self.tail_lengths(codes))
        self.fronts = [front + count for front, count in zip(self.fronts, due, strict=True)]

    def _alive_tail(self, alive: Tensor, codes: Codes, count: int) -> Tensor:
        starts = column([front + packed for front, packed in zip(self.fronts, codes.counts, strict=True)], alive.device)
        index = (torch.arange(count, device=alive.device) + starts).clamp(max=alive.shape[2] - 1)
        heads = self.filled[0].buffer.shape[1]
        return alive.gather(2, index[:, None].expand(-1, alive.shape[1], -1)).expand(-1, heads, -1)

    def evict(self, keep: Tensor) -> None:
        """Keeps the slots in the mask `keep` [B, H or 1, S]: packed ones become holes, the others move together.

        Units of nothing but holes give their bytes back when `pack` or `free_units` is called next.
        """
        self._may_free |= holes.evict(self, keep)

    def free_units(self) -> None:
        """Frees units of nothing but holes: as many of each row as every head has."""
        holes.free_units(self)
        self._may_free = False

    def units_beyond(self, room: int) -> list[int] | None:
        """How many units each row would have to give up to take no more than `room` slots; None where none has to."""
        units = [-(-max(0, length - room) // self.unit) for length in self.lengths]
        return units if any(units) else None

    def evict_middle(self, first: list[int], last: list[int]) -> None:
        """Keeps the first `first[b]` and the last `last[b]` slots of each row."""
        device = self.filled[0].buffer.device
        self.evict(ends_mask(self.lengths, first, last, device) & (self.current_positions(device) >= 0))

    def memory(self) -> dict[str, int]:
        """Bytes by what they are. `residual` is all that is in full precision, `holes` what is held for nothing."""
        sizes: dict[str, int] = dict.fromkeys(
            ("keys", "values", "scales", "residual", "positions", "scores", "holes", "spare"), 0
        )
        for name, codes in (("keys", self.keys), ("values", self.values)):
            for target, parts in ((name, ("words",)), ("scales", ("scale", "minimum"))):
                used, spare = codes.nbytes(parts)
                empty = holes.empty_bytes(self, codes, used)
                sizes[target] += used - empty
                sizes["holes"] += empty
                sizes["spare"] += spare
        full = [part for pair in (self.front, self.tail) if pair for part in pair]
        for name, part in [("residual", part) for part in full] + list(self.per_slot().items()):
            used = part.bytes_per_slot * part.used
            sizes[name] += used
            sizes["spare"] += part.buffer.untyped_storage().nbytes() - used
        return sizes

    def columns(self) -> dict[str, Growing]:
        named = {f"keys.{name}": part for name, part in self.keys.parts.items()}
        named |= {f"values.{name}": part for name, part in self.values.parts.items()}
        for name, pair in (("front", self.front), ("tail", self.tail)):
            if pair:
                named |= {f"{name}.keys": pair[0], f"{name}.values": pair[1]}
        return named | self.per_slot()

    def fork(self, copies: int = 1) -> PackedStore:
        other = PackedStore(0, self.bits, self.group_size, self.residual, self.front_size)
        other.copy_state(self, copies)
        other.keys, other.values = self.keys.fork(copies), self.values.fork(copies)
        other.front = (self.front[0].fork(copies), self.front[1].fork(copies)) if self.front else None
        other.tail = (self.tail[0].fork(copies), self.tail[1].fork(copies)) if self.tail else None
        other.has_holes, other._may_free = self.has_holes, self._may_free
        other.fronts = [front for front in self.fronts for _ in range(copies)]
        return other

    def row_numbers(self) -> list[list[int]]:
        return [*super().row_numbers(), self.fronts, self.keys.counts, self.values.counts]

    def select_rows(self, index: list[int], on_device: Tensor) -> None:
        """Keeps rows `index` in that order; `on_device` is the same on the store's device."""
        self.select_counts(index)
        self.keys.counts = [self.keys.counts[row] for row in index]
        self.values.counts = [self.values.counts[row] for row in index]
        self.fronts = [self.fronts[row] for row in index]
        entries = self._entries()
        for name, part in self.columns().items():
            part.select_rows(on_device, entries[name])

    def _entries(self) -> dict[str, int]:
        """How many entries of each part the longest row needs."""
        needed = {"positions": self.length, "scores": self.length}
        for name, codes in (("keys", self.keys), ("values", self.values)):
            for part, tokens in codes.tokens_per_entry.items():
                needed[f"{name}.{part}"] = -(-max(codes.counts) // tokens)
            needed[f"tail.{name}"] = max(self.tail_lengths(codes))
            needed[f"front.{name}"] = self.front_size
        return needed

    def take_over(self, dense: DenseStore) -> None:
        """Starts from the unpacked tokens of `dense`, sharing its memory."""
        self.copy_state(dense, 1)
        keys, values = dense.filled
        self._choose_value_groups(values.buffer.shape[-1])
        self.tail = keys.fork(), values.fork()
        for part in self.tail:
            part.floor = self.floor

    def tensors(self) -> dict[str, Tensor]:
        """The used part of every tensor, for `save`."""
        entries = self._entries()
        return {name: part.view[:, :, : entries[name]] for name, part in self.columns().items()}

    def state(self) -> dict[str, Any]:
        names = ("bits", "group_size", "residual")
        return {
            **super().state(),
            "options": {name: getattr(self, name) for name in names} | {"front": self.front_size},
            "fronts": self.fronts,
            "packed_keys": self.keys.counts,
            "packed_values": self.values.counts,
            "holes": self.has_holes,
        }

    @classmethod
    def load(cls, state: dict[str, Any], tensors: dict[str, Tensor]) -> PackedStore:
        """The store that `state()` and `tensors()` described."""
        store = cls(len(state["lengths"]), **state["options"], with_scores=state["with_scores"])
        store.lengths, store.seen, store.has_holes = list(state["lengths"]), list(state["seen"]), state["holes"]
        store.fronts = list(state["fronts"])
        grown = {name: Growing(tensor) for name, tensor in tensors.items()}
        store.positions, store.scores = grown.pop("positions", None), grown.pop("scores", None)
        if "front.keys" in grown:
            store.front = Growing(tensors["front.keys"], floor=0), Growing(tensors["front.values"], floor=0)
        if "tail.keys" in grown:
            store.tail = (
                Growing(tensors["tail.keys"], PACKED_SPARE),
                Growing(tensors["tail.values"], PACKED_SPARE),
            )
            store.values.group_size = min(store.group_size, store.tail[1].buffer.shape[-1])
        for codes, counts, prefix in (
            (store.keys, state["packed_keys"], "keys."),
            (store.values, state["packed_values"], "values."),
        ):
            codes.counts = list(counts)
            codes.parts = {name.removeprefix(prefix): part for name, part in grown.items() if name.startswith(prefix)}
            for name, part in codes.parts.items():
                part.floor = -(-PACKED_SPARE // codes.tokens_per_entry[name])
        return store


def _drop_first(tail: Growing, counts: list[int], lengths: list[int]) -> None:
    """Drops the first `counts[b]` of the `lengths[b]` tokens of each row."""
    if len(set(counts)) == 1:
        tail.drop_middle(0, counts[0])
        return
    left = max(length - count for length, count in zip(lengths, counts, strict=True))
    device = tail.buffer.device
    tail.gather((torch.arange(left, device=device) + column(counts, device)[:, None]).clamp(max=tail.used - 1))
