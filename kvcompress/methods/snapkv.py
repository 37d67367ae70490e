"""SnapKV: what the prompt's last queries look at."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from kvcompress.budget import Budget, check_budget
from kvcompress.methods.base import Acts, Evicting
from kvcompress.methods.options import check_count
from kvcompress.methods.view import LayerView


@dataclass(frozen=True)
class SnapKV(Evicting):
    """Keep what the prompt's last `window` queries attend to (arXiv 2404.14469, section 4 and listing 1).

    At the end of prefill each older key gets the attention of the last `window` queries, summed over them and pooled
    over `kernel` neighbours; the top `budget - window` stay, with the window itself. Decoding only appends: the
    cache holds `budget` tokens plus every token generated since, and grows past a budget in bytes. A further prompt on
    a filled cache chooses again from what is kept and what is new, to the same total.

    Chunked prefill keeps exact KV until the last chunk. Deviation: votes are averaged over the query heads of a KV
    head before pooling, so that one set of keys is kept for all of them; `pooling="max"` is the authors' published
    code's default, `"avg"` the paper's listing.
    """

    budget: Budget
    window: int = 32
    kernel: int = 7
    pooling: Literal["max", "avg"] = "max"

    name: ClassVar[str] = "snapkv"
    acts: ClassVar[Acts] = "prefill"

    def check(self) -> None:
        check_count("window", self.window)
        if isinstance(self.kernel, bool) or not isinstance(self.kernel, int) or self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel must be an odd integer of at least 1, got {self.kernel!r}")
        if self.pooling not in ("max", "avg"):
            raise ValueError(f'pooling must be "max" or "avg", got {self.pooling!r}')
        check_budget(self.budget, at_least=self.window, reason="the observation window")

    @property
    def query_window(self) -> int:
        return self.window

    def keep(self, layer: LayerView) -> Tensor:
        tokens = layer.tokens(self.budget)
        window = layer.last([min(self.window, count) for count in tokens])
        votes = layer.attention_of_last(self.window).masked_fill(window, 0)
        votes = layer.over_neighbours(votes, lambda near: pool(near, self.kernel, self.pooling))
        return layer.top(votes, tokens, always=window)


def pool(votes: Tensor, kernel: int, pooling: Literal["max", "avg"]) -> Tensor:
    """Pools votes [B, H, S] with stride 1; averages count the zeros beyond the ends, as torch's avg_pool1d does."""
    if pooling == "avg":
        return F.avg_pool1d(votes, kernel, stride=1, padding=kernel // 2)
    return F.max_pool1d(votes, kernel, stride=1, padding=kernel // 2)
