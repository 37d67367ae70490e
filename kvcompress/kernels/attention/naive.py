"""Attention in plain torch: the truth that the fast kernels are tested against.

B batch, H KV heads, G query heads per KV head, M rows of queries, T new tokens, S stored tokens, D head dim.
All arithmetic is in fp32 whatever the dtype of what is stored.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from kvcompress.kernels.softmax import Softmax

QUERY_BLOCK = 256  # queries whose logits exist at one time


class Stored(Protocol):
    """Keys and values that can be attended to, in whatever form they are stored."""

    @property
    def length(self) -> int: ...

    def logits(self, query: Tensor, front_query: Tensor | None = None) -> Tensor:
        """`query` fp32 [B, H, M, D] (before a front: `front_query`, if given) times the keys: fp32 [B, H, M, S]."""
        ...

    def mix(self, weights: Tensor) -> Tensor:
        """`weights` fp32 [B, H, M, S] times the values: fp32 [B, H, M, D]."""
        ...


Allowed = Callable[[int, int], Tensor | None]
"""From a range of query columns to a mask broadcastable to [B, H, T, S]; None where everything may be seen."""


def attend(
    query: Tensor,
    stored: Stored,
    allowed: Allowed,
    softmax: Softmax,
    sum_columns: bool = False,
    front_query: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of `query` [B, H, G, T, D] over everything stored, a block of queries at a time.

    Returns the output [B, H, G, T, D] in the query's dtype and, where asked for, the sum over the queries of each
    key's softmax column (see `scores/naive.py`). Beside these it holds the logits of one block. If given, `front_query`
    stands for `query` before the tokens of a front.
    """
    outputs, sums = [], None
    for weights in blocks_of_weights(query, stored, allowed, softmax, front_query):
        outputs.append(stored.mix(weights.flatten(2, 3)).view(*weights.shape[:-1], -1).to(query.dtype))
        if sum_columns:
            sums = add_columns(sums, weights)
    return torch.cat(outputs, 3), sums


def blocks_of_weights(
    query: Tensor, stored: Stored, allowed: Allowed, softmax: Softmax, front_query: Tensor | None = None
) -> Iterator[Tensor]:
    """Softmax weights fp32 [B, H, G, T, S] of one block of queries after the other."""
    batch, heads, groups, columns, _ = query.shape
    for start in range(0, columns, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, columns)
        block, front = (
            None if each is None else each[..., start:stop, :].float().flatten(2, 3) * softmax.scaling
            for each in (query, front_query)
        )
        assert block is not None
        logits = stored.logits(block, front).view(batch, heads, groups, stop - start, stored.length)
        mask = allowed(start, stop)
        yield normalise(logits, None if mask is None else mask.unsqueeze(2), softmax)


def normalise(logits: Tensor, allowed: Tensor | None, softmax: Softmax) -> Tensor:
    """Row-wise softmax in place of scaled fp32 `logits` [B, H, G, T, S].

    A row that may see nothing (a padding query) becomes zeros, not NaN.
    """
    if softmax.softcap is not None:
        logits.div_(softmax.softcap).tanh_().mul_(softmax.softcap)
    if allowed is not None:
        logits.masked_fill_(~allowed, -torch.inf)
    top = logits.amax(-1, keepdim=True)
    extra = None if softmax.sinks is None else softmax.sinks.float()[None, :, :, None, None]
    if extra is not None:
        top = torch.maximum(top, extra)
    top.masked_fill_(top == -torch.inf, 0)
    logits.sub_(top).exp_()
    total = logits.sum(-1, keepdim=True)
    if extra is not None:
        total = total + (extra - top).exp()
    return logits.div_(total.masked_fill_(total == 0, 1))


def add_columns(sums: Tensor | None, weights: Tensor) -> Tensor:
    """Adds the column sums of weights [B, H, G, T, S], averaged over the G query heads, to fp32 `sums` [B, H, S]."""
    columns = weights.sum(3).mean(2)
    return columns if sums is None else sums.add_(columns)
