"""What an eviction leaves where KV heads keep different numbers of tokens: one frozen segment in flat memory.

B rows, H KV heads, S slots, D head dim, M rows of queries, N tokens in all.
"""

from __future__ import annotations

from itertools import accumulate, chain
from typing import Any, Literal

import torch
from torch import Tensor

from kvcompress.formats.base import Packs
from kvcompress.kernels.host import on_device
from kvcompress.kernels.layout import TABLES, Range
from kvcompress.stores.codes import Codes
from kvcompress.stores.growing import Growing

Counts = list[list[int]]
"""One number for each KV head of each row."""


class Ragged:
    """Keys and values of `counts[b][h]` tokens of KV head h of row b, one head after the other without gaps.

    Each head's first `packed[b][h]` tokens are packed, whole units of them, the rest in full precision. Nothing is ever
    appended. As slots, heads are left-aligned: those that hold less than the longest end in slots that hold nothing.
    """

    def __init__(self, counts: Counts, keys: Tensor, values: Tensor, packs: Packs | None = None) -> None:
        self.counts, self.packed = counts, [[0] * len(row) for row in counts]
        self.tail = Growing(keys, floor=0), Growing(values, floor=0)  # [1, 1, N, D]
        self.keys = Codes(1, "keys", packs.format("keys") if packs else None)
        self.values = Codes(1, "values", packs.format("values") if packs else None)
        self.keys.prepare(keys.shape[-1])
        self.values.prepare(values.shape[-1])
        self._lay_out()

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, keep: Tensor, packs: Packs | None) -> Ragged:
        """What is kept of keys and values [B, H, S, D]: the slots in the mask `keep` [B, H, S]."""
        flat = keys[keep][None, None], values[keep][None, None]
        return cls(keep.sum(-1).tolist(), *flat, packs)

    def _lay_out(self) -> None:
        """Tells the kernels where each head begins."""
        device = self.tail[0].buffer.device
        packed, rest = list(chain(*self.packed)), list(chain(*self._rest))
        none = [0] * len(packed)
        starts = [list(accumulate(each, initial=0))[:-1] for each in (packed, rest)]
        tables = [none, packed, packed, list(chain(*self.counts)), *starts]
        lines = on_device(list(chain(*tables)), device).view(len(TABLES), len(self.counts), -1)
        self.lines = Growing(lines, floor=0)

    @property
    def _rest(self) -> Counts:
        """How many tokens of each head are in full precision."""
        rows = zip(self.counts, self.packed, strict=True)
        return [[count - packed for count, packed in zip(*row, strict=True)] for row in rows]

    @property
    def length(self) -> int:
        """Slots of the longest head."""
        return max(map(max, self.counts))

    @property
    def lengths(self) -> list[int]:
        """The same for every row."""
        return [self.length] * len(self.counts)

    @property
    def packed_rows(self) -> list[bool]:
        """Whether a token of each row is packed."""
        return [any(row) for row in self.packed]

    @property
    def plain(self) -> None:
        """Never one rectangle."""
        return None

    def _table(self, numbers: Counts) -> Tensor:
        """One number for each KV head of each row on the device: int64 [B, H, 1]."""
        return on_device(list(chain(*numbers)), self.tail[0].buffer.device).view(len(numbers), -1, 1)

    def decoded(self, which: Literal[0, 1]) -> Tensor:
        """All keys (0) or values (1) [B, H, S, D] in full precision, zeros where there is no token. A copy."""
        flat, codes = self.tail[which].view[0, 0], (self.keys, self.values)[which]
        slots = torch.arange(self.length, device=flat.device)
        packed, held = self._table(self.packed), self._table(self.counts)
        first_packed, first_of_tail = self.lines.buffer[4, ..., None], self.lines.buffer[5, ..., None]
        out = flat.new_zeros(*held.shape[:2], self.length, flat.shape[-1])
        for source, inside, place in (
            (flat, (slots >= packed) & (slots < held), slots - packed + first_of_tail),
            (None, slots < packed, slots + first_packed),
        ):
            if source is None and codes.parts:
                source = codes.decoded(slice(None), codes.counts[0])[0, 0].to(flat.dtype)
            if source is not None:
                out[inside] = source[place[inside]]
        return out

    def logits(self, query: Tensor, front_query: Tensor | None = None) -> Tensor:
        """`query` fp32 [B, H, M, D] times all keys: fp32 [B, H, M, S]; slots without a token are to be masked."""
        return query @ self.decoded(0).float().transpose(-1, -2)

    def mix(self, weights: Tensor) -> Tensor:
        """`weights` fp32 [B, H, M, S] times all values: fp32 [B, H, M, D]."""
        return weights @ self.decoded(1).float()

    def range(self) -> Range | None:
        """All tensors as the kernels read them; None where what is packed is in a format that they do not know."""
        operands = self.keys.operand, self.values.operand
        if any(codes.parts and known is None for codes, known in zip((self.keys, self.values), operands, strict=True)):
            return None
        rows = len(self.counts)
        packed = [max(map(max, self.packed))] * rows
        tails = self.tail[0].view, self.tail[1].view
        return Range(None, None, *operands, *tails, [0] * rows, packed, packed, self.lengths, self.lines.buffer)

    def pack(self, unit: int) -> None:
        """Packs whole units of `unit` tokens of each head; those that do not fill one stay in full precision."""
        if any(map(any, self.packed)) or self.keys.format is None:
            return
        packed = [[count // unit * unit for count in row] for row in self.counts]
        most = max(map(max, packed))
        if not most:
            return
        whole = self.decoded(0), self.decoded(1)
        slots, held = torch.arange(self.length, device=whole[0].device), self._table(packed)
        rest = (slots >= held) & (slots < self._table(self.counts))
        for which, codes in ((0, self.keys), (1, self.values)):
            padded = Codes(len(packed), codes.kind, codes.format)
            padded.prepare(codes.dim)
            padded.append(whole[which][:, :, :most], [most] * len(packed), None)
            for name, part in padded.parts.items():
                own = torch.arange(part.used, device=held.device) < held // codes.layout[name].tokens
                codes.parts[name] = Growing(part.view[own][None, None], floor=0)
            codes.counts = [sum(map(sum, packed))]
        self.packed = packed
        self.tail = Growing(whole[0][rest][None, None], floor=0), Growing(whole[1][rest][None, None], floor=0)
        self._lay_out()

    def columns(self) -> dict[str, Growing]:
        """All that is stored, by name."""
        named = {f"keys.{name}": part for name, part in self.keys.parts.items()}
        named |= {f"values.{name}": part for name, part in self.values.parts.items()}
        return named | {"keys": self.tail[0], "values": self.tail[1], "lines": self.lines}

    def category(self, name: str) -> str:
        """Where `memory()` counts the column of that name."""
        if name == "lines":
            return "positions"
        kind, _, part = name.partition(".")
        codes = self.keys if kind == "keys" else self.values
        if part:
            return codes.category(name)
        return kind if codes.format is None else "residual"

    def turn(self, rotary: Any, delta: Tensor) -> None:
        """Rotates the keys by `delta` [B, H or 1, S] positions; packed ones cannot be."""
        self.compact()  # rows that were the same until now may turn by different angles
        slots = torch.arange(self.length, device=delta.device)
        inside = slots < self._table(self.counts)
        keys = self.tail[0].view
        keys.copy_(rotary.rotate(keys, delta.expand_as(inside)[inside][None, None]))

    def fork(self, copies: int = 1) -> Ragged:
        """The same memory for another owner, every row `copies` times."""
        index = [row for row in range(len(self.counts)) for _ in range(copies)]
        return self._with_rows(index, on_device(index, self.lines.buffer.device))

    def select_rows(self, index: list[int], on_device: Tensor) -> Ragged:
        """Rows `index` in that order; `on_device` is the same there. The memory is shared, unless fewer rows are left.

        Where all rows hold as many tokens in each head, only `on_device` needs to be right.
        """
        chosen = self._with_rows(index, on_device)
        if len(index) < len(self.counts):
            chosen.compact()
        return chosen

    def row_numbers(self) -> list[list[int]]:
        """Every number that the host keeps of each row."""
        return [[row[head] for row in each] for each in (self.counts, self.packed) for head in range(len(each[0]))]

    def compact(self) -> None:
        """Gives every head of every row memory of its own, in their order."""
        packed, rest = self._table(self.packed), self._table(self._rest)
        first_packed, first_of_tail = self.lines.buffer[4, ..., None], self.lines.buffer[5, ..., None]
        self.tail = _taken(self.tail[0], first_of_tail, rest), _taken(self.tail[1], first_of_tail, rest)
        for codes in (self.keys, self.values):
            for name, part in codes.parts.items():
                tokens = codes.layout[name].tokens
                codes.parts[name] = _taken(part, first_packed // tokens, packed // tokens)
            codes.counts = [sum(map(sum, self.packed))]
        self._lay_out()

    def state(self) -> dict[str, Any]:
        """What `save` writes beside the tensors of `columns()`, but for the lines, which follow from it."""
        return {"heads": self.counts, "heads_packed": self.packed}

    @classmethod
    def load(cls, state: dict[str, Any], tensors: dict[str, Tensor], packs: Packs | None) -> Ragged:
        """What `state()` and `columns()` described."""
        loaded = cls(state["heads"], tensors["keys"], tensors["values"], packs)
        loaded.packed = state["heads_packed"]
        for codes in (loaded.keys, loaded.values):
            parts = {name: f"{codes.kind}.{name}" for name in codes.layout}
            codes.load(
                [sum(map(sum, loaded.packed))], {n: tensors[full] for n, full in parts.items() if full in tensors}
            )
        loaded._lay_out()
        return loaded

    def _with_rows(self, index: list[int], on_device: Tensor) -> Ragged:
        other = object.__new__(Ragged)
        other.counts, other.packed = [self.counts[row] for row in index], [self.packed[row] for row in index]
        other.tail = self.tail[0].fork(), self.tail[1].fork()
        other.keys, other.values = self.keys.fork(1), self.values.fork(1)
        other.lines = Growing(self.lines.buffer.index_select(1, on_device), floor=0)
        return other


def _taken(part: Growing, first: Tensor, count: Tensor) -> Growing:
    """Of a flat column [1, 1, N, ...] the `count` entries from `first` on of each line [B, H, 1]; a copy."""
    span = torch.arange(int(count.max()), device=count.device)
    return Growing(part.view.index_select(2, (first + span)[span < count]), floor=0)
