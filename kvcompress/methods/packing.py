"""The base of methods that pack tokens into fewer bits, and what they take."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvcompress.budget import LayerShape
from kvcompress.formats.base import Format, Kind, unit
from kvcompress.methods.base import Acts, Method
from kvcompress.stores.store import Store


@dataclass(frozen=True)
class Packing(Method):
    """A method that holds tokens in a format of fewer bits, the newest in full precision.

    A subclass has an option or property `residual`, how many tokens stay in full precision at most, and gives
    `format`. When tokens are packed is KIVI's schedule: keys in steps of `residual` (all at once, when so many have
    gathered), values all but the last `residual` (arXiv 2402.02750, algorithm 1); `due` says otherwise where needed.
    A token attends in full precision before it is packed; nothing is packed twice. Acts on every call, each chunk of a
    chunked prefill included.
    """

    acts: ClassVar[Acts] = "every_call"

    if TYPE_CHECKING:
        residual: int

    @abstractmethod
    def format(self, kind: Kind) -> Format:
        """The format that keys or values are packed in."""

    def due(self, kind: Kind, waiting: int) -> int:
        """How many of `waiting` tokens in full precision are packed now, oldest first."""
        if kind == "keys":
            return waiting - waiting % self.residual
        return max(0, waiting - self.residual)

    @property
    def packing(self) -> Packing | None:
        return self

    @property
    def unit(self) -> int:
        """Packed tokens whose bytes come back together once all of them are evicted."""
        return unit(self)

    def new_store(self, rows: int) -> Store:
        return Store(rows, self)

    def check_layer(self, layer: LayerShape) -> None:
        self.format("keys").check("keys", layer.key_dim)
        self.format("values").check("values", layer.value_dim)

    def stored_bytes(self, layer: LayerShape, kept: list[int], seen: list[int]) -> int:
        return self.prefilled_bytes(layer, kept)

    def prefilled_bytes(self, layer: LayerShape, tokens: list[int], front: int = 0) -> int:
        """Bytes of all rows right after a prefill that kept `tokens[b]` tokens, the first `front` not to be packed."""
        packs = [count >= front + self.residual for count in tokens]
        fronts = [front if each else 0 for each in packs]
        rest = [count - apart for count, apart in zip(tokens, fronts, strict=True)]
        keys, values = (
            [self.due(kind, count) if each else 0 for count, each in zip(rest, packs, strict=True)]
            for kind in ("keys", "values")
        )
        tails = (max(count - packed for count, packed in zip(rest, part, strict=True)) for part in (keys, values))
        # A part of any row is as long as the longest row's.
        return len(tokens) * self.bytes_of_parts(layer, max(fronts), (max(keys), max(values)), *tails)

    def bytes_of_parts(
        self, layer: LayerShape, front: int, packed: tuple[int, int], key_tail: int, value_tail: int
    ) -> int:
        """Bytes of one row of so many tokens: first ones apart, packed keys and values, and those not packed yet."""
        keys = self.format("keys").nbytes("keys", layer.key_dim, packed[0])
        values = self.format("values").nbytes("values", layer.value_dim, packed[1])
        full = (front + key_tail) * layer.key_dim + (front + value_tail) * layer.value_dim
        return layer.heads * (keys + values + full * layer.itemsize)
