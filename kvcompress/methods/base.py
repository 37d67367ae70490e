"""What a method is: a frozen dataclass that says what stays of the KV, and what it needs to see for that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from torch import Tensor

from kvcompress.budget import Budget, LayerShape, check_budget, parse_bytes
from kvcompress.methods.options import check_positions, check_text_form, plain
from kvcompress.stores.store import Store

if TYPE_CHECKING:
    from kvcompress.methods.packing import Packing
    from kvcompress.methods.view import LayerView

Acts = Literal["never", "prefill", "every_call"]
PositionMode = Literal["original", "cache"]

registry: dict[str, type[Method]] = {}


def _register(kind: type[Method]) -> None:
    """Makes `kind` known by its name; one that inherits a method's name would share its records and stored results."""
    if "__post_init__" in kind.__dict__:
        raise TypeError(
            f"{kind.__name__} defines __post_init__, where methods check their options; name it check(self)"
        )
    name = kind.__dict__.get("name")
    if name is None:
        inherited: str | None = getattr(kind, "name", None)
        if inherited is not None:
            raise TypeError(
                f"{kind.__name__} needs a name of its own, since {inherited!r} is {registry[inherited].__name__}; "
                f'write for example name = "{kind.__name__.lower()}" in it'
            )
        return
    if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
        raise TypeError(f"the name of {kind.__name__} is {name!r}; it must be a word that can stand in a method's text")
    taken = registry.get(name)
    # The same class made once more, as when a notebook's cell runs again, takes the former one's place.
    if taken is not None and (taken.__module__, taken.__qualname__) != (kind.__module__, kind.__qualname__):
        raise TypeError(
            f"the name {name!r} of {kind.__name__} belongs to {taken.__module__}.{taken.__qualname__}; choose another"
        )
    registry[name] = kind


@dataclass(frozen=True)
class Ends:
    """A decision to keep the first `first[b]` and the last `last[b]` tokens of row b, the same in every head."""

    first: list[int]
    last: list[int]


@dataclass(frozen=True)
class Kept:
    """A decision to keep the slots in `mask` [B, H, S]: `counts[b]` in every head of row b, None where not known."""

    mask: Tensor
    counts: list[int] | None


@dataclass(frozen=True)
class Method:
    """Base of all methods. A subclass that sets `name` is registered under it and can be used in text form.

    Options become Python's own numbers and texts before anything sees them. A subclass checks its own in `check`.
    """

    name: ClassVar[str]
    acts: ClassVar[Acts] = "never"
    always_shown: ClassVar[tuple[str, ...]] = ()  # options that the text form names even at their default

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _register(cls)

    def __post_init__(self) -> None:
        for option in fields(self):
            if option.name in ("name", "acts"):
                raise TypeError(
                    f"{option.name} is no option of a method; write `{option.name} = {option.default!r}` in "
                    f"{type(self).__name__}, without a type"
                )
            object.__setattr__(self, option.name, plain(getattr(self, option.name)))
        self._check_inherited()
        self.check()
        for option in fields(self):
            value = getattr(self, option.name)
            if not isinstance(value, Method):
                check_text_form(option.name, value)

    def _check_inherited(self) -> None:
        """Checks the options that a base class knows the meaning of."""

    def check(self) -> None:
        """Raises ValueError or TypeError for options that mean nothing; called when a method is made."""

    def check_layer(self, layer: LayerShape) -> None:
        """Raises ValueError if a layer of this shape cannot be stored; called before a model is loaded, where known."""

    @property
    def evicting(self) -> Evicting | None:
        """The part that evicts tokens, if any."""
        return None

    @property
    def packing(self) -> Packing | None:
        """The part that packs what stays, if any."""
        return None

    @property
    def position_mode(self) -> PositionMode:
        """`cache` if a kept token's rotary position becomes its slot."""
        return "original"

    @property
    def every_call(self) -> bool:
        """Whether what is stored changes while decoding, beyond the appended tokens."""
        return any(part is not None and part.acts == "every_call" for part in (self.evicting, self.packing))

    def new_store(self, rows: int) -> Store:
        """An empty store for one layer."""
        return Store(rows)

    @property
    def grows(self) -> bool:
        """Whether the cache grows with every token that is decoded; if not, what prefill left is the most it keeps."""
        return self.evicting is None or self.evicting.acts != "every_call"

    @property
    def byte_budget(self) -> int | None:
        """The option `budget` in bytes, if it is a size of the whole cache."""
        budget = getattr(self.evicting, "budget", None)
        return parse_bytes(budget) if isinstance(budget, str) else None

    def stored_bytes(self, layer: LayerShape, kept: list[int], seen: list[int]) -> int:
        """Bytes that `layer` stores, spare apart, right after one prefill that kept `kept[b]` of `seen[b]` tokens.

        Every row takes as much as the longest.
        """
        return len(seen) * layer.exact_bytes(max(seen))

    def most_slots(self, kept: int) -> int:
        """The most slots that a row has while it keeps at most `kept` tokens: more where packing leaves holes."""
        return kept

    def most_bytes(self, layer: LayerShape, kept: int) -> int:
        """The most bytes that one row of `layer` ever stores after a call that leaves at most `kept` tokens."""
        return self.stored_bytes(layer, [kept], [kept + 1])

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
    `query_window` (how many of the prompt's last queries it wants to look from). An option named `budget` is tokens,
    a ratio or bytes, and is checked to be one.
    """

    positions: PositionMode = field(default="original", kw_only=True)

    needs_scores: ClassVar[bool] = False
    per_head: ClassVar[bool] = True

    def _check_inherited(self) -> None:
        check_positions(self.positions)
        for option in fields(self):
            budget: Budget | None = getattr(self, option.name)
            if option.name == "budget" and (budget is not None or option.default is not None):
                check_budget(cast("Budget", budget))

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

    @property
    def slots_before_gaps(self) -> int | None:
        """How many first slots may hold tokens older than evicted ones; None where any slot may."""
        return None

    def kept_tokens(self, tokens: Callable[[Budget], int]) -> int:
        """How many tokens of a long enough prompt stay, where `tokens(budget)` is what a budget means for it.

        What the option `budget` says. Raises ValueError for a method that has none and does not define this.
        """
        budget = getattr(self, "budget", None)
        if budget is None:
            raise ValueError(
                f"the size of {self} is not known: define kept_tokens(self, tokens) in {type(self).__name__}, "
                "which returns how many tokens stay"
            )
        return tokens(budget)

    def keep(self, layer: LayerView) -> Tensor | Ends | Kept:
        """Which slots stay: a mask [B, H, S] with as many true slots in every head of a row, `Ends` or `Kept`."""
        raise TypeError(f"{type(self).__name__} must define keep(layer)")

    def new_store(self, rows: int) -> Store:
        return Store(rows, front=self.protected if self.positions == "cache" else 0, with_scores=self.needs_scores)

    def stored_bytes(self, layer: LayerShape, kept: list[int], seen: list[int]) -> int:
        return len(kept) * (layer.exact_bytes(max(kept)) + self.slot_bytes(layer, max(kept), kept != seen))

    def slot_bytes(self, layer: LayerShape, slots: int, evicted: bool) -> int:
        """Bytes of positions and scores beside the KV of one row of `slots` slots; positions once it has evicted."""
        positions = 4 * (layer.heads if self.per_head else 1) * slots if evicted else 0
        return positions + (4 * layer.heads * slots if self.needs_scores else 0)
