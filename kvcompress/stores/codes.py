"""Packed keys or values of one segment that grow at the end of each row, in any format."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcompress.formats.base import Format, Kind, Part
from kvcompress.stores.growing import Growing

Rows = slice
PACKED_SPARE = 32  # packed tokens that there may be room for; as many may lie unused in the residual


def runs_of_rows(*per_row: list[int]) -> list[tuple[Rows, tuple[int, ...]]]:
    """The whole batch as one slice where all rows agree on every number given, else each row on its own."""
    numbers = list(zip(*per_row, strict=True))
    if len(set(numbers)) == 1:
        return [(slice(0, len(numbers)), numbers[0])]
    return [(slice(row, row + 1), row_numbers) for row, row_numbers in enumerate(numbers)]


class Codes:
    """The tensors of a format; `counts[b]` tokens of row b are packed. Without a format nothing ever is."""

    def __init__(self, rows: int, kind: Kind, format: Format | None) -> None:
        self.kind: Kind = kind
        self.format = format
        self.counts = [0] * rows
        self.parts: dict[str, Growing] = {}
        self.layout: dict[str, Part] = {}
        self.floor = PACKED_SPARE
        self.dim = 0

    def prepare(self, dim: int) -> None:
        """Says how many numbers a token has. Raises ValueError if the format cannot hold them."""
        self.dim = dim
        if self.format is not None:
            self.format.check(self.kind, dim)
            self.layout = self.format.parts(self.kind, dim)

    def held(self, rows: Rows = slice(None)) -> dict[str, Tensor]:
        """All that is packed of some rows, as its format reads it."""
        return {name: part.view[rows] for name, part in self.parts.items()}

    @property
    def operand(self) -> Any:
        """All that is packed, as the fast kernels take it; None while nothing is, or where they cannot."""
        return self.format.operand(self.kind, self.held()) if self.format and self.parts else None

    def decoded(self, rows: Rows, count: int) -> Tensor:
        """The first `count` packed tokens of some rows as fp32 [B, H, count, D]."""
        assert self.format is not None
        return self.format.read(self.kind, self.held(rows), 0, count, self.dim)

    def logits(self, query: Tensor, rows: Rows, count: int) -> Tensor:
        """`query` fp32 [B, H, M, D] of some rows times their first `count` keys: fp32 [B, H, M, count]."""
        assert self.format is not None
        return self.format.logits(query, self.held(rows), count)

    def mix(self, weights: Tensor, rows: Rows) -> Tensor:
        """`weights` fp32 [B, H, M, count] of some rows times their first values: fp32 [B, H, M, D]."""
        assert self.format is not None
        return self.format.mix(weights, self.held(rows), weights.shape[-1], self.dim)

    def append(self, x: Tensor, counts: list[int], alive: Tensor | None) -> None:
        """Packs the first `counts[b]` tokens of `x` [B, H, T, D]; those not `alive` [B, H, T] are holes."""
        if not any(counts):
            return
        assert self.format is not None
        if not self.parts:
            self._start(x)
        for rows, (offset, count) in runs_of_rows(self.counts, counts):
            if count:
                present = None if alive is None else alive[rows, :, :count, None].expand(-1, -1, -1, x.shape[-1])
                self._reserve(offset + count)
                # Reserving made the parts writable, so the format may write into the views that it is given.
                self.format.write(self.kind, self.held(rows), offset, x[rows, :, :count], present)
        self.counts = [offset + count for offset, count in zip(self.counts, counts, strict=True)]

    def _start(self, x: Tensor) -> None:
        for name, part in self.layout.items():
            empty = x.new_zeros(*x.shape[:2], 0, *part.shape, dtype=part.dtype)
            self.parts[name] = Growing(empty, -(-self.floor // part.tokens))

    def _reserve(self, tokens: int) -> None:
        for name, part in self.parts.items():
            part.reserve(-(-tokens // self.layout[name].tokens))

    def entries(self, tokens: int) -> dict[str, int]:
        """How many entries of each part hold `tokens` tokens."""
        return {name: -(-tokens // part.tokens) for name, part in self.layout.items() if name in self.parts}

    def keep_units(self, index: Tensor, unit: int, counts: list[int]) -> None:
        """Keeps the units `index` [B, H, K] of `unit` tokens each, `counts[b]` tokens in all.

        Whole entries move, no code changes.
        """
        left = self.entries(max(counts))
        for name, part in self.parts.items():
            each = unit // self.layout[name].tokens
            expanded = (index[..., None] * each + torch.arange(each, device=index.device)).flatten(-2)
            part.gather(expanded[:, :, : left[name]].clamp(max=part.used - 1))
        self.counts = counts

    def select_rows(self, index: list[int], on_device: Tensor) -> None:
        """Keeps rows `index` in that order."""
        self.counts = [self.counts[row] for row in index]
        for name, entries in self.entries(max(self.counts)).items():
            self.parts[name].select_rows(on_device, entries)

    def category(self, name: str) -> str:
        """Where `memory()` counts the column of that name: as codes of keys or values, or as scales."""
        return "scales" if self.layout[name.removeprefix(f"{self.kind}.")].is_scale else self.kind

    def split(self, count: int) -> tuple[Codes, Codes]:
        """The first `count` tokens of every row, sharing their memory, and the rest with memory of its own."""
        before, rest = self.fork(1), self.fork(1)
        before.parts = self.parts
        before.counts = [count] * len(self.counts)
        rest.counts = [each - count for each in self.counts]
        rest.parts = {}
        if any(rest.counts):
            for name, part in self.parts.items():
                tokens = self.layout[name].tokens
                rest.parts[name] = Growing(part.view[:, :, count // tokens :].clone(), -(-self.floor // tokens))
        return before, rest

    def fork(self, copies: int) -> Codes:
        other = Codes(0, self.kind, self.format)
        other.counts = [count for count in self.counts for _ in range(copies)]
        other.parts = {name: part.fork(copies) for name, part in self.parts.items()}
        other.layout, other.floor, other.dim = self.layout, self.floor, self.dim
        return other

    def load(self, counts: list[int], tensors: dict[str, Tensor]) -> None:
        """Takes over what a saved cache holds of it."""
        self.counts = list(counts)
        self.parts = {name: Growing(each, -(-self.floor // self.layout[name].tokens)) for name, each in tensors.items()}


def joined_codes(each: list[Codes]) -> Codes:
    """The tokens of all, one after the other, with memory of their own; all but the last are whole entries."""
    whole = each[-1].fork(1)
    before = sum(max(codes.counts) for codes in each[:-1])
    whole.counts = [before + count for count in whole.counts]
    whole.parts = {}
    for name in each[0].parts or each[-1].parts:
        tokens = whole.layout[name].tokens
        held = [codes.parts[name].view[:, :, : codes.entries(max(codes.counts))[name]] for codes in each if codes.parts]
        whole.parts[name] = Growing(torch.cat(held, 2), -(-whole.floor // tokens))
    return whole
