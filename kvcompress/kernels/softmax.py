"""What a model puts around its attention logits: one object that every kernel takes."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Softmax:
    """softmax(cap(scaling · q·k)), with extra logits that take weight and give nothing.

    `softcap` bounds the logits to softcap · tanh(logit / softcap), as in Gemma 2; None leaves them. `sinks` [H, G],
    one for each query head, are gpt-oss's extra logits; None means that there are none.
    """

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether it is what torch's own attention computes."""
        return self.softcap is None and self.sinks is None

    def extra_logits(self, heads: int, groups: int, device: torch.device) -> Tensor:
        """The sinks as fp32 [H, G]; where there are none, logits that count for nothing."""
        if self.sinks is not None:
            return self.sinks.to(torch.float32).contiguous()
        return _no_sinks(heads, groups, device)


@cache
def _no_sinks(heads: int, groups: int, device: torch.device) -> Tensor:
    return torch.full((heads, groups), -torch.inf, dtype=torch.float32, device=device)
