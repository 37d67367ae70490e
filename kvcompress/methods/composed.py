"""`A | B`: evict, then pack what stays."""

from dataclasses import dataclass
from typing import ClassVar

from kvcompress.budget import LayerShape
from kvcompress.methods.base import Evicting, Method, PositionMode
from kvcompress.methods.packing import Packing
from kvcompress.stores.store import Store


@dataclass(frozen=True)
class Composed(Method):
    """An evicting method chooses exactly as it would alone; the second packs what it keeps.

    Evicting a packed token leaves a masked hole; the bytes of a group come back when every KV head of the row has a
    group of nothing but holes. StreamingLLM's sinks stay in full precision.

    Under a budget in bytes holes count: where they leave no room for as many tokens as fit without them, each KV head
    gives up the packed units whose best token has the lowest vote, so that it holds fewer tokens for a while.
    """

    first: Evicting
    second: Packing

    acts: ClassVar = "every_call"

    def check(self) -> None:
        recent = self.first.shortest_recent
        if self.first.acts == "every_call" and recent is not None and recent < self.second.residual:
            raise ValueError(
                f"{self.first} keeps {recent} newest tokens, fewer than the residual of {self.second.residual} tokens "
                f"that {self.second} holds in full precision; keep at least {self.second.residual}, or lower residual"
            )
        if self.first.positions == "cache" and self.first.name != "streaming_llm":
            raise ValueError(
                f'{self.first.name} with positions="cache" would rotate packed keys again; '
                f'use positions="original", or streaming_llm, whose sinks stay unpacked'
            )

    def check_layer(self, layer: LayerShape) -> None:
        self.first.check_layer(layer)
        self.second.check_layer(layer)

    @property
    def evicting(self) -> Evicting | None:
        return self.first

    @property
    def packing(self) -> Packing | None:
        return self.second

    @property
    def position_mode(self) -> PositionMode:
        return self.first.positions

    def new_store(self, rows: int) -> Store:
        return Store(rows, self.second, self.first.protected, self.first.needs_scores)

    def stored_bytes(self, layer: LayerShape, kept: list[int], seen: list[int]) -> int:
        packed = self.second.prefilled_bytes(layer, kept, self.first.protected)
        return packed + len(kept) * self.first.slot_bytes(layer, max(kept), kept != seen)

    def most_slots(self, kept: int) -> int:
        """A row that never packs has no holes; one that does has fewer than a unit, or `CacheLayer` frees one."""
        return kept + (self.second.unit - 1 if kept >= self.first.protected + self.second.residual else 0)

    def most_bytes(self, layer: LayerShape, kept: int) -> int:
        front, residual = self.first.protected, self.second.residual
        slots = self.most_slots(kept)
        beside = self.first.slot_bytes(layer, slots, evicted=True)
        if kept < front + residual:
            return layer.exact_bytes(kept) + beside
        # One row may have all of its keys packed while another one's residual is full, or its first tokens unpacked.
        packed = slots - front, slots - front - residual
        tails = front + residual - 1, residual + max(0, front - 1)
        return self.second.bytes_of_parts(layer, front, packed, *tails) + beside

    def __str__(self) -> str:
        return f"{self.first} | {self.second}"


def compose(first: Method, second: Method) -> Composed:
    """`first | second`. Raises TypeError unless an evicting method stands before a packing one."""
    if isinstance(first, Evicting) and isinstance(second, Packing):
        return Composed(first, second)
    raise TypeError(
        f"cannot compose {first} | {second}: a composition is one evicting method, then one that packs, such as kivi; "
        f'for example "snapkv(budget=0.25) | kivi(bits=2)"'
    )
