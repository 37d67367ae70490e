"""What a format is: how keys or values are held in memory, and how they are attended to as they are held.

B rows, H KV heads, S tokens, D head dim, M rows of queries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from math import lcm, prod
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

Kind = Literal["keys", "values"]
KINDS: tuple[Kind, Kind] = ("keys", "values")
TILE = 1024  # tokens that are decoded at one time, rounded to what a format can begin at


class Part(NamedTuple):
    """One tensor [B, H, entries, *shape] of a format; an entry stands for `tokens` tokens.

    `is_scale` says where `memory()` counts it: scales, minima and the like, or the codes themselves.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    tokens: int = 1
    is_scale: bool = False


class Format(ABC):
    """A way to hold keys or values. A subclass is a frozen dataclass that gives `parts`, `write` and `read`.

    What is written is held as `parts` say, and every byte count (of a budget, `size`, `save`, `memory()`) comes from
    there. Keys arrive with rotary applied. Attention needs no more than `read`; a format that can do it without
    decoding gives `logits` and `mix`, and one that has fast kernels gives `operand`.
    """

    @abstractmethod
    def parts(self, kind: Kind, dim: int) -> dict[str, Part]:
        """The tensors that hold keys or values of `dim` numbers a token, by name."""

    @abstractmethod
    def write(self, kind: Kind, into: Mapping[str, Tensor], offset: int, x: Tensor, alive: Tensor | None) -> None:
        """Encodes `x` [B, H, T, D] as tokens `offset` to `offset + T` of the tensors `into`, which have room for them.

        T and `offset` are multiples of `group`. `alive` [B, H, T, D] is false for tokens that nobody attends to any
        more; None where there are none.
        """

    @abstractmethod
    def read(self, kind: Kind, held: Mapping[str, Tensor], start: int, stop: int, dim: int) -> Tensor:
        """Tokens [start, stop) as fp32 [B, H, stop - start, D]; `start` is a multiple of `grain`."""

    def check(self, kind: Kind, dim: int) -> None:
        """Raises ValueError for a head dim that the format cannot hold."""
        return

    def group(self, kind: Kind) -> int:
        """How many tokens are encoded together."""
        return 1

    def grain(self, kind: Kind) -> int:
        """How many tokens begin at entries of their own in every part, so that they can be moved or shared alone."""
        return self.group(kind)

    def nbytes(self, kind: Kind, dim: int, tokens: int) -> int:
        """Bytes that `tokens` tokens of one KV head take."""
        parts = self.parts(kind, dim).values()
        return sum(-(-tokens // part.tokens) * prod(part.shape) * part.dtype.itemsize for part in parts)

    def logits(self, query: Tensor, held: Mapping[str, Tensor], count: int) -> Tensor:
        """`query` fp32 [B, H, M, D] times the first `count` keys: fp32 [B, H, M, count], a tile decoded at a time."""
        out = query.new_empty(*query.shape[:3], count)
        for start, stop in self._tiles("keys", count):
            out[..., start:stop] = query @ self.read("keys", held, start, stop, query.shape[-1]).transpose(-1, -2)
        return out

    def mix(self, weights: Tensor, held: Mapping[str, Tensor], count: int, dim: int) -> Tensor:
        """`weights` fp32 [B, H, M, count] times the first `count` values: fp32 [B, H, M, D], a tile at a time."""
        out = weights.new_zeros(*weights.shape[:3], dim)
        for start, stop in self._tiles("values", count):
            out += weights[..., start:stop] @ self.read("values", held, start, stop, dim)
        return out

    def operand(self, kind: Kind, held: Mapping[str, Tensor]) -> Any:
        """The same tensors as the fast kernels take them; None where there are no kernels for this format."""
        return None

    def _tiles(self, kind: Kind, count: int) -> Iterator[tuple[int, int]]:
        grain = self.grain(kind)
        size = max(grain, TILE // grain * grain)
        for start in range(0, count, size):
            yield start, min(start + size, count)


class Packs(Protocol):
    """What a store needs to know of how its tokens are packed."""

    @property
    def residual(self) -> int:
        """How many of the newest tokens stay in full precision at most, before some of them are packed."""
        ...

    def format(self, kind: Kind) -> Format:
        """The format that keys or values are packed in."""
        ...

    def due(self, kind: Kind, waiting: int) -> int:
        """How many of `waiting` tokens in full precision are to be packed now, oldest first."""
        ...


def unit(packs: Packs) -> int:
    """Tokens whose bytes come back together once all of them are evicted: whole entries of keys and of values."""
    return lcm(*(lcm(packs.format(kind).group(kind), packs.format(kind).grain(kind)) for kind in KINDS))
