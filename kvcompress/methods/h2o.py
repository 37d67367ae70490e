"""H2O: the tokens that have drawn the most attention so far, and the newest ones."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from kvcompress.budget import Budget, check_budget
from kvcompress.methods.base import Acts, Evicting, Kept
from kvcompress.methods.view import LayerView


@dataclass(frozen=True)
class H2O(Evicting):
    """Keep the `heavy` tokens with the largest accumulated attention and the `recent` newest (arXiv 2306.14048).

    The score of a key is the running sum of its softmax column over every query so far (algorithm 1), the newest
    included; it follows its token. After prefill and after every call the top `heavy` of those older than the recent
    window stay. Each is tokens or a ratio of the prompt; `budget` (tokens, a ratio or bytes) gives half to each.

    Deviations: scores are averaged over the query heads of a KV head, so that one set of keys is kept for all of
    them (the paper's models had no grouped queries), and are held in fp32.
    """

    heavy: int | float | None = None
    recent: int | float | None = None
    budget: Budget | None = None

    name: ClassVar[str] = "h2o"
    acts: ClassVar[Acts] = "every_call"
    needs_scores: ClassVar[bool] = True

    def check(self) -> None:
        if self.budget is not None:
            if self.heavy is not None or self.recent is not None:
                raise ValueError(
                    f"give budget, or heavy and recent, not both: {self.budget!r}, {self.heavy!r}, {self.recent!r}"
                )
            check_budget(self.budget, at_least=2, reason="one heavy and one recent token")
            return
        if self.heavy is None or self.recent is None:
            raise ValueError("h2o needs heavy and recent, or budget; for example h2o(heavy=256, recent=256)")
        for option, value in (("heavy", self.heavy), ("recent", self.recent)):
            if isinstance(value, str):
                raise ValueError(f"{option} {value!r} must be tokens or a ratio; a size in bytes goes into budget")
            check_budget(value, option)

    @property
    def shortest_recent(self) -> int | None:
        recent = self.recent if self.budget is None else self.budget
        if not isinstance(recent, int):
            return None
        return recent if self.budget is None else recent - recent // 2

    def kept_tokens(self, tokens: Callable[[Budget], int]) -> int:
        if self.budget is not None:
            return tokens(self.budget)
        assert self.heavy is not None and self.recent is not None
        return tokens(self.heavy) + tokens(self.recent)

    def keep(self, layer: LayerView) -> Kept:
        if self.budget is not None:
            total = layer.tokens(self.budget)
            recent = [count - count // 2 for count in total]
        else:
            assert self.heavy is not None and self.recent is not None
            recent = layer.tokens(self.recent)
            total = [heavy + newest for heavy, newest in zip(layer.tokens(self.heavy), recent, strict=True)]
        return layer.top_beside_newest(layer.scores, total, recent)
