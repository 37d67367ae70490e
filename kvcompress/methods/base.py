"""What a method is: a frozen dataclass that says what stays of the KV, and what it needs to see for that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from kvcompress.budget import Budget, LayerShape
from kvcompress.stores.dense import DenseStore
from kvcompress.stores.packed import PackedStore

if TYPE_CHECKING:
    from kvcompress.methods.kivi import KIVI
    from kvcompress.methods.view import LayerView

Acts = Literal["never", "prefill", "every_call"]
PositionMode = Literal["original", "cache"]

registry: dict[str, type[Method]] = {}


@dataclass(frozen=True)
class Ends:
    """A decision to keep the first `first[b]` and the last `last[b]` tokens of row b, the same in every head."""

    first: list[int]
    last: list[int]


@dataclass(frozen=True)
class Method:
    """Base of all methods. A subclass that sets `name` is registered under it and can be used in text form."""

    name: ClassVar[str]
    acts: ClassVar[Acts] = "never"
    always_shown: ClassVar[tuple[str, ...]] = ()  # options that the text form names even at their default

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            registry[cls.name] = cls

    @property
    def evicting(self) -> Evicting | None:
        """The part that evicts tokens, if any."""
        return None

    @property
    def packing(self) -> KIVI | None:
        """The part that quantises what stays, if any."""
        return None

    @property
    def position_mode(self) -> PositionMode:
        """`cache` if a kept token's rotary position becomes its slot."""
        return "original"

    @property
    def every_call(self) -> bool:
        """Whether what is stored changes while decoding, beyond the appended tokens."""
        return any(part is not None and part.acts == "every_call" for part in (self.evicting, self.packing))

    def new_store(self, rows: int) -> DenseStore | PackedStore:
        """An empty store for one layer."""
        return DenseStore(rows)

    def stored_bytes(self, layer: LayerShape, kept: int, seen: int) -> int:
        """Bytes that one row of `layer` stores for `kept` of `seen` tokens, spare apart."""
        return layer.exact_bytes(seen)

    def __or__(self, other: Method) -> Method:
        from kvcompress.methods.composed import compose

        return compose(self, other)

    def __str__(self) -> str:
        """The text form, with the options that differ from their defaults."""
        shown = []
        for option in fields(self):
            value = getattr(self, option.name)
            if option.default is MISSING or value != option.default or option.name in self.always_shown:
                shown.append(f"{option.name}={value!r}")
        return f"{self.name}({', '.join(shown)})" if shown else self.name


@dataclass(frozen=True)
class Evicting(Method):
    """A method that keeps some tokens of each KV head and forgets the rest.

    A subclass gives `keep` and, where it needs them, sets `needs_scores` (a running sum of attention columns) or
    `query_window` (how many of the prompt's last queries it wants to look from).
    """

    positions: PositionMode = field(default="original", kw_only=True)

    needs_scores: ClassVar[bool] = False
    per_head: ClassVar[bool] = True

    @property
    def evicting(self) -> Evicting | None:
        return self

    @property
    def position_mode(self) -> PositionMode:
        return self.positions

    @property
    def query_window(self) -> int:
        """How many of the prompt's last queries `keep` looks from."""
        return 0

    @property
    def protected(self) -> int:
        """How many first tokens a packing partner leaves in full precision."""
        return 0

    @property
    def shortest_recent(self) -> int | None:
        """The number of newest tokens that are never evicted while decoding; None where it depends on the prompt."""
        return None

    def kept_tokens(self, tokens: Callable[[Budget], int]) -> int:
        """How many tokens of a long enough prompt stay, where `tokens(budget)` is what a budget means for it."""
        raise TypeError(f"{type(self).__name__} must define kept_tokens(tokens) to have its size worked out")

    def keep(self, layer: LayerView) -> Tensor | Ends:
        """Which slots stay: a mask [B, H, S] with as many true slots in every head of a row, or `Ends`."""
        raise TypeError(f"{type(self).__name__} must define keep(layer)")

    def new_store(self, rows: int) -> DenseStore | PackedStore:
        return DenseStore(rows, with_scores=self.needs_scores)

    def stored_bytes(self, layer: LayerShape, kept: int, seen: int) -> int:
        return layer.exact_bytes(kept) + self.slot_bytes(layer, kept, seen)

    def slot_bytes(self, layer: LayerShape, kept: int, seen: int) -> int:
        """Bytes of positions and scores beside the KV of one row."""
        positions = 4 * (layer.heads if self.per_head else 1) * kept if kept < seen else 0
        return positions + (4 * layer.heads * kept if self.needs_scores else 0)


def check_positions(positions: str) -> None:
    """Raises ValueError unless `positions` is one of the two modes."""
    if positions not in ("original", "cache"):
        raise ValueError(f'positions must be "original" or "cache", got {positions!r}')
