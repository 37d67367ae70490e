"""Dense attention through torch's own scaled_dot_product_attention, keys and values never repeated to query heads.

B batch, H KV heads, G query heads per KV head, T query columns, S slots, D head dim.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_BLOCK = 1024  # columns whose mask exists at one time


def causal(query: Tensor, keys: Tensor, values: Tensor, *, scaling: float) -> Tensor:
    """`query` [B, H, G, T, D] over `keys`, `values` [B, H, S, D]: column t sees all but the T - 1 - t newest slots."""
    batch, heads, groups, columns, _ = query.shape
    if columns == 1:
        # All query heads of a KV head stand in the query axis: one pass over the keys.
        return F.scaled_dot_product_attention(query.squeeze(3), keys, values, scale=scaling).unsqueeze(3)
    past = keys.shape[2] - columns
    out = query.new_empty(batch, heads, groups, columns, values.shape[-1])
    if past == 0:
        for group in range(groups):
            out[:, :, group] = F.scaled_dot_product_attention(
                query[:, :, group], keys, values, is_causal=True, scale=scaling
            )
        return out
    for start in range(0, columns, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, columns)
        visible = past + stop
        mask = torch.ones(stop - start, visible, dtype=torch.bool, device=query.device).tril(past + start)
        for group in range(groups):
            out[:, :, group, start:stop] = F.scaled_dot_product_attention(
                query[:, :, group, start:stop], keys[:, :, :visible], values[:, :, :visible], mask, scale=scaling
            )
    return out


def masked(
    query: Tensor, keys: Tensor, values: Tensor, allowed: Callable[[int, int], Tensor | None], *, scaling: float
) -> Tensor:
    """The same under any mask; `allowed(start, stop)` gives it for those columns, [B, H or 1, T, S].

    A column that may see nothing is a padding query: its output is finite and means nothing.
    """
    columns = query.shape[3]
    blocks = []
    for start in range(0, columns, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, columns)
        mask = allowed(start, stop)
        assert mask is not None
        mask = mask | ~mask.any(-1, keepdim=True)
        if stop - start == 1:
            folded = query[..., start:stop, :].flatten(2, 3)
            blocks.append(F.scaled_dot_product_attention(folded, keys, values, mask, scale=scaling).unsqueeze(3))
            continue
        per_group = [
            F.scaled_dot_product_attention(query[:, :, group, start:stop], keys, values, mask, scale=scaling)
            for group in range(query.shape[2])
        ]
        blocks.append(torch.stack(per_group, 2))
    return torch.cat(blocks, 3)
