"""A run of one layer's slots: first tokens in full precision, packed ones, and the newest in full precision.

B rows, H KV heads, S slots, D head dim, M rows of queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from kvcompress.formats.base import Packs
from kvcompress.kernels.layout import Range
from kvcompress.stores.codes import PACKED_SPARE, Codes, joined_codes, runs_of_rows
from kvcompress.stores.growing import Growing
from kvcompress.stores.slots import column

Pair = tuple[Growing, Growing]
"""Keys and values [B, H, S, D]."""


class Segment:
    """Keys and values of the same slots. Every row is left-aligned and has a length of its own.

    Row b has, in this order: `fronts[b]` tokens in full precision (none, or `front_size`), packed ones, and the tail in
    full precision. Packed keys end before the keys of the tail and packed values before its values; the two ends
    differ. A segment of which nothing is packed has a tail alone.
    """

    def __init__(self, rows: int, packs: Packs | None = None, front_size: int = 0) -> None:
        self.packs, self.front_size = packs, front_size
        self.floor = 64 if packs is None else PACKED_SPARE
        self.lengths = [0] * rows
        self.fronts = [0] * rows
        self.origins = [0] * rows  # of each row, how many tokens were evicted before its front
        self.front: Pair | None = None
        self.tail: Pair | None = None
        self.keys = Codes(rows, "keys", packs.format("keys") if packs else None)
        self.values = Codes(rows, "values", packs.format("values") if packs else None)

    def set_floor(self, tokens: int) -> None:
        """Lets so many tokens' room lie unused however little is stored."""
        self.floor = self.keys.floor = self.values.floor = tokens
        for part in self.columns().values():
            part.floor = min(part.floor, tokens)

    @property
    def filled(self) -> Pair:
        """Keys and values in full precision behind what is packed."""
        if self.tail is None:
            raise ValueError("this layer holds no keys yet; feed the model at least one token first")
        return self.tail

    @property
    def sides(self) -> Iterator[tuple[Literal[0, 1], Codes, Growing]]:
        """Keys, then values: which they are, what is packed of them, and their tail."""
        keys, values = self.filled
        yield 0, self.keys, keys
        yield 1, self.values, values

    @property
    def length(self) -> int:
        """Slots of the longest row."""
        return max(self.lengths)

    @property
    def plain(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values [B, H, S, D] as long as all of them lie in full precision in one tensor, else None."""
        if any(self.keys.counts) or any(self.values.counts) or any(self.fronts):
            return None
        return self.filled[0].view, self.filled[1].view

    @property
    def packed_rows(self) -> list[bool]:
        """Whether a token of each row is packed."""
        return [keys + values > 0 for keys, values in zip(self.keys.counts, self.values.counts, strict=True)]

    @property
    def is_shared(self) -> bool:
        """Whether another store holds its memory too, or rows are the same memory."""
        parts = [*self.filled, *self.keys.parts.values(), *self.values.parts.values()]
        return any(part.is_read_elsewhere for part in parts)

    def splits_at(self, unit: int) -> int:
        """How many first slots can be held apart from the rest, whole entries of every part; 0 if rows differ."""
        numbers = self.lengths, self.fronts, self.keys.counts, self.values.counts
        if any(each.count(each[0]) != len(each) for each in numbers):
            return 0
        if self.packs is None:
            return self.lengths[0]
        packed = min(self.keys.counts[0], self.values.counts[0]) // unit * unit
        return self.fronts[0] + packed if packed else 0

    def split(self, unit: int) -> tuple[Segment, Segment]:
        """The first `splits_at(unit)` slots, sharing their memory, and the rest with memory of its own."""
        rows, slots = len(self.lengths), self.splits_at(unit)
        before, rest = Segment(0, self.packs, self.front_size), Segment(rows, self.packs)
        rest.set_floor(self.floor)
        packed = slots - self.fronts[0]
        before.lengths, before.fronts, before.front = [slots] * rows, self.fronts, self.front
        before.origins = self.origins
        rest.lengths = [length - slots for length in self.lengths]
        keys, values = self.filled
        empty = Growing.like(keys.view, self.floor), Growing.like(values.view, self.floor)
        if self.packs is None:
            before.keys, before.values, before.tail = self.keys, self.values, self.tail
            rest.start(keys.view, values.view)
        else:
            before.keys, rest.keys = self.keys.split(packed)
            before.values, rest.values = self.values.split(packed)
            before.tail, rest.tail = empty, self.tail
        return before, rest

    def category(self, name: str) -> str:
        """Where `memory()` counts the column of that name."""
        kind, _, part = name.partition(".")
        if part and kind != "front":
            return (self.keys if kind == "keys" else self.values).category(name)
        return "residual" if self.packs else part or kind

    def turn(self, rotary: Any, delta: Tensor) -> None:
        """Rotates the keys by `delta` [B, H or 1, S] positions; packed ones cannot be."""
        if any(self.keys.counts):
            raise ValueError("packed keys do not rotate")
        for rows, (front, length) in runs_of_rows(self.fronts, self.lengths):
            parts = [(self.filled[0].writable()[rows, :, : length - front], delta[rows, :, front:length])]
            if self.front and front:
                parts.append((self.front[0].writable()[rows, :, :front], delta[rows, :, :front]))
            for keys, distance in parts:
                keys.copy_(rotary.rotate(keys, distance))

    def tail_lengths(self, codes: Codes) -> list[int]:
        rows = zip(self.lengths, self.fronts, codes.counts, strict=True)
        return [length - front - count for length, front, count in rows]

    def start(self, keys: Tensor, values: Tensor) -> None:
        """Makes room for keys and values such as `keys` and `values` [B, H, T, D]."""
        self.keys.prepare(keys.shape[-1])
        self.values.prepare(values.shape[-1])
        self.tail = Growing.like(keys, self.floor), Growing.like(values, self.floor)

    def append(self, keys: Tensor, values: Tensor, counts: list[int]) -> None:
        """Stores the last `counts[b]` columns of `keys` and `values` [B, H, T, D] in full precision."""
        if self.tail is None:
            self.start(keys, values)
        assert self.tail is not None
        self.tail[0].append(keys, self.tail_lengths(self.keys), counts)
        self.tail[1].append(values, self.tail_lengths(self.values), counts)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def logits(self, query: Tensor, front_query: Tensor | None = None) -> Tensor:
        """`query` fp32 [B, H, M, D] times all keys: fp32 [B, H, M, S]; holes and row ends get values to be masked.

        `front_query`, if given, stands for it before the front.
        """
        before = query if front_query is None else front_query
        out = query.new_zeros(*query.shape[:3], self.length)
        for rows, (front, packed, length) in runs_of_rows(self.fronts, self.keys.counts, self.lengths):
            tail = front + packed
            if self.front and front:
                out[rows, ..., :front] = before[rows] @ self.front[0].view[rows].float().transpose(-1, -2)
            if packed:
                out[rows, ..., front:tail] = self.keys.logits(query[rows], rows, packed)
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
                out[rows] += self.values.mix(weights[rows, ..., front:tail], rows)
            values = self.filled[1].view[rows, :, : length - tail].float()
            out[rows] += weights[rows, ..., tail:length] @ values
        return out

    def decoded(self, which: Literal[0, 1]) -> Tensor:
        """All keys (0) or values (1) [B, H, S, D] in full precision; holes and row ends are anything finite. A copy."""
        codes, full = (self.keys, self.values)[which], self.filled[which].buffer
        out = full.new_zeros(*full.shape[:2], self.length, full.shape[-1])
        for rows, (front, packed, length) in runs_of_rows(self.fronts, codes.counts, self.lengths):
            tail = front + packed
            if self.front and front:
                out[rows, :, :front] = self.front[which].view[rows]
            if packed:
                out[rows, :, front:tail] = codes.decoded(rows, packed)
            out[rows, :, tail:length] = self.filled[which].view[rows, :, : length - tail]
        return out

    def range(self) -> Range | None:
        """All tensors as the kernels read them; None where what is packed is in a format that they do not know."""
        front = (None, None) if self.front is None else (self.front[0].view, self.front[1].view)
        packed = self.keys.operand, self.values.operand
        if any(codes.parts and known is None for codes, known in zip((self.keys, self.values), packed, strict=True)):
            return None
        tails = self.filled[0].view, self.filled[1].view
        counts = self.fronts, self.keys.counts, self.values.counts, self.lengths
        return Range(*front, *packed, *tails, *counts)

    def pack(self, alive: Tensor | None) -> None:
        """Packs what is due; `alive` [B, H, S] says which slots are no holes, None where none is."""
        assert self.packs is not None
        self.split_front(self.front_size + self.packs.residual)
        # Until a row's front stands apart, its first tokens are not to be packed, nor are those behind them.
        ready = [front == self.front_size for front in self.fronts]
        for _, codes, tail in self.sides:
            lengths = self.tail_lengths(codes)
            due = [self.packs.due(codes.kind, length) for length in lengths]
            due = [count if is_ready else 0 for count, is_ready in zip(due, ready, strict=True)]
            if any(due):
                present = None if alive is None else self._alive_tail(alive, codes, max(due))
                codes.append(tail.view, due, present)
                drop_first(tail, due, lengths)

    def _alive_tail(self, alive: Tensor, codes: Codes, count: int) -> Tensor:
        """Which of the first `count` slots of the tail hold a token: bool [B, H, count]."""
        starts = [front + packed for front, packed in zip(self.fronts, codes.counts, strict=True)]
        index = torch.arange(count, device=alive.device) + column(starts, alive.device)
        index = index.clamp(max=alive.shape[2] - 1)
        heads = self.filled[0].buffer.shape[1]
        return alive.gather(2, index[:, None].expand(-1, alive.shape[1], -1)).expand(-1, heads, -1)

    def split_front(self, enough: int) -> None:
        """Sets the first tokens of rows that hold `enough` aside, in full precision."""
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
        for _, codes, tail in self.sides:
            drop_first(tail, due, self.tail_lengths(codes))
        self.fronts = [front + count for front, count in zip(self.fronts, due, strict=True)]

    def columns(self) -> dict[str, Growing]:
        """All that is stored, by its name in a saved cache."""
        named = {f"keys.{name}": part for name, part in self.keys.parts.items()}
        named |= {f"values.{name}": part for name, part in self.values.parts.items()}
        for prefix, pair in (("front.", self.front), ("", self.tail)):
            if pair:
                named |= {f"{prefix}keys": pair[0], f"{prefix}values": pair[1]}
        return named

    def entries(self) -> dict[str, int]:
        """How many entries of each column the longest row needs."""
        needed = {}
        for _, codes, _ in self.sides:
            needed |= {f"{codes.kind}.{name}": count for name, count in codes.entries(max(codes.counts)).items()}
            needed[codes.kind] = max(self.tail_lengths(codes))
            if self.front:
                needed[f"front.{codes.kind}"] = self.front_size
        return needed

    def fork(self, copies: int = 1) -> Segment:
        """The same memory for another owner, every row `copies` times."""
        other = Segment(0, self.packs, self.front_size)
        other.floor = self.floor
        other.lengths = [length for length in self.lengths for _ in range(copies)]
        other.fronts = [front for front in self.fronts for _ in range(copies)]
        other.origins = [origin for origin in self.origins for _ in range(copies)]
        other.keys, other.values = self.keys.fork(copies), self.values.fork(copies)
        other.front = (self.front[0].fork(copies), self.front[1].fork(copies)) if self.front else None
        other.tail = (self.tail[0].fork(copies), self.tail[1].fork(copies)) if self.tail else None
        return other

    def select_rows(self, index: list[int], on_device: Tensor) -> None:
        """Keeps rows `index` in that order; `on_device` is the same on the segment's device."""
        self.lengths = [self.lengths[row] for row in index]
        self.fronts = [self.fronts[row] for row in index]
        self.origins = [self.origins[row] for row in index]
        for codes in (self.keys, self.values):
            codes.select_rows(index, on_device)
        entries = self.entries()
        full = [("", self.tail), ("front.", self.front)]
        for name, part in ((f"{prefix}{kind}", pair[at]) for prefix, pair in full if pair for at, kind in KINDS):
            part.select_rows(on_device, entries[name])

    def state(self) -> dict[str, Any]:
        """What `save` writes beside the tensors."""
        return {
            "lengths": self.lengths,
            "fronts": self.fronts,
            "origins": self.origins,
            "packed_keys": self.keys.counts,
            "packed_values": self.values.counts,
        }

    def load(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Takes over what `state()` and the tensors of `columns()` described."""
        self.lengths, self.fronts = list(state["lengths"]), list(state["fronts"])
        self.origins = list(state["origins"])
        for prefix, floor in (("", self.floor), ("front.", 0)):
            if f"{prefix}keys" in tensors:
                pair = tuple(Growing(tensors[f"{prefix}{kind}"], floor) for _, kind in KINDS)
                setattr(self, "front" if prefix else "tail", pair)
        for codes, counts, tail in (
            (self.keys, state["packed_keys"], self.filled[0]),
            (self.values, state["packed_values"], self.filled[1]),
        ):
            codes.prepare(tail.buffer.shape[-1])
            own = {name.removeprefix(f"{codes.kind}."): each for name, each in tensors.items()}
            codes.load(counts, {name: own[name] for name in codes.layout if name in own})


KINDS = ((0, "keys"), (1, "values"))


def joined(segments: list[Segment]) -> Segment:
    """The slots of neighbouring segments, all but the last the same in every row, in one with memory of its own."""
    first, last = segments[0], segments[-1]
    whole = Segment(0, first.packs, first.front_size)
    whole.set_floor(last.floor)
    before = sum(segment.length for segment in segments[:-1])
    whole.lengths, whole.fronts = [before + length for length in last.lengths], first.fronts
    whole.origins = first.origins
    whole.front = None if first.front is None else (first.front[0].fork(), first.front[1].fork())
    whole.keys = joined_codes([segment.keys for segment in segments])
    whole.values = joined_codes([segment.values for segment in segments])
    tails = [
        torch.cat([segment.filled[which].view[:, :, : _width(segment, which)] for segment in segments], 2)
        for which in (0, 1)
    ]
    whole.tail = Growing(tails[0], last.floor), Growing(tails[1], last.floor)
    return whole


def _width(segment: Segment, which: Literal[0, 1]) -> int:
    return max(segment.tail_lengths((segment.keys, segment.values)[which]))


def drop_first(tail: Growing, counts: list[int], lengths: list[int]) -> None:
    """Drops the first `counts[b]` of the `lengths[b]` tokens of each row."""
    if len(set(counts)) == 1:
        tail.drop_middle(0, counts[0])
        return
    left = max(length - count for length, count in zip(lengths, counts, strict=True))
    device = tail.buffer.device
    tail.gather((torch.arange(left, device=device) + column(counts, device)[:, None]).clamp(max=tail.used - 1))
