"""StreamingLLM: the first tokens and the newest ones."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from kvcompress.budget import Budget, check_budget
from kvcompress.methods.base import Acts, Ends, Evicting, PositionMode
from kvcompress.methods.options import check_count
from kvcompress.methods.view import LayerView


@dataclass(frozen=True)
class StreamingLLM(Evicting):
    """Keep the first `sinks` tokens and the last `window` (arXiv 2309.17453, section 3.2).

    Acts on every call: a new token attends to all that is stored and itself, then the oldest beside the sinks goes.
    With `positions="cache"`, as in the paper, a token's rotary position is its slot, so texts far past the trained
    length stay in range; a longer prompt is prefilled in chunks. `budget` (tokens, a ratio or bytes) may stand in
    place of `window`, which is then `budget - sinks`; a budget of no more than the sinks keeps that many last tokens.

    Deviation: the paper keeps keys without rotary and rotates all of them at every step; here only the sinks are
    rotated again, which gives the same distances. Packed keys (`streaming_llm | kivi`) are never rotated again, so
    there positions count up without being brought back and fp32 rotary loses precision past about 1e6 tokens.
    """

    sinks: int = 4
    window: int | None = None
    budget: Budget | None = None
    positions: PositionMode = field(default="cache", kw_only=True)

    name: ClassVar[str] = "streaming_llm"
    acts: ClassVar[Acts] = "every_call"
    per_head: ClassVar[bool] = False

    def check(self) -> None:
        check_count("sinks", self.sinks, at_least=0)
        if self.budget is not None and self.window is not None:
            raise ValueError(f"give budget or window, not both: budget={self.budget!r}, window={self.window!r}")
        if self.budget is not None:
            check_budget(self.budget, at_least=self.sinks + 1, reason="the sinks and one token")
        elif self.window is None:
            object.__setattr__(self, "window", 1020)
        else:
            check_count("window", self.window, hint="; a ratio goes into budget")

    @property
    def protected(self) -> int:
        return self.sinks

    @property
    def slots_before_gaps(self) -> int | None:
        return self.sinks if type(self).keep is StreamingLLM.keep else None  # a subclass may choose otherwise

    @property
    def shortest_recent(self) -> int | None:
        if self.window is not None:
            return self.window
        return self.budget - self.sinks if isinstance(self.budget, int) else None

    def kept_tokens(self, tokens: Callable[[Budget], int]) -> int:
        if self.window is not None:
            return self.sinks + self.window
        assert self.budget is not None
        return tokens(self.budget)

    def keep(self, layer: LayerView) -> Ends:
        if self.window is not None:
            rows = len(layer.lengths)
            return layer.ends([self.sinks] * rows, [self.window] * rows)
        assert self.budget is not None
        tokens = layer.tokens(self.budget)
        sinks = [self.sinks if count > self.sinks else 0 for count in tokens]
        return layer.ends(sinks, [count - first for count, first in zip(tokens, sinks, strict=True)])
