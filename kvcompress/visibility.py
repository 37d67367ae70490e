"""Which stored slots each query column may see, from the rules that transformers gives for the layer.

B rows, H KV heads, T query columns of this call, S slots.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kvcompress.cache_layer import CacheLayer
from kvcompress.errors import WrapError
from kvcompress.stores.slots import column


@dataclass(frozen=True)
class LazyMask:
    """What transformers would have made a mask from; evaluated at the slots that a layer still stores."""

    rule: Callable[..., Tensor]
    arguments: dict[str, Any] = field(repr=False)

    @property
    def is_causal(self) -> bool:
        """Whether the rule is plain causality: a full-attention layer."""
        return self.rule is causal_mask_function

    def materialise(self) -> Tensor | None:
        """The mask that transformers' own sdpa attention would have got, for a call without our cache."""
        return sdpa_mask(**self.arguments)


def lazy_mask(**arguments: Any) -> LazyMask:
    """The mask function registered with transformers."""
    if arguments.get("use_vmap"):
        raise WrapError(
            "this model overlays its causal mask with a rule of its own (image or prefix tokens that see ahead); "
            "only causal, sliding and chunked attention run over a compressed cache"
        )
    return LazyMask(arguments["mask_function"], arguments)


@dataclass(frozen=True)
class Visibility:
    """`causal`: row ends line up and column t sees all but the newest T - 1 - t slots. Else `mask` says.

    `all_held`: the only column sees every token that is held, so that a kernel which knows how many each row and KV
    head hold needs no mask.
    """

    causal: bool
    mask: Callable[[int, int], Tensor | None]
    all_held: bool = False

    def kernel_mask(self, start: int, stop: int) -> Tensor | None:
        """The mask of columns [start, stop) for a kernel that knows how many tokens each row and KV head hold."""
        return None if self.all_held else self.mask(start, stop)


EVERYTHING = Visibility(True, lambda start, stop: None, all_held=True)
"""A single column, the newest, of rows that end together: it sees all slots."""


def visibility(layer: CacheLayer, lazy: LazyMask | None) -> Visibility:
    """What the columns of the call that the layer's cache is in may see of its slots, new ones included."""
    store, call = layer.store, layer.cache.call
    whole = store.uniform and not store.has_gaps and call.counts.count(call.columns) == len(call.counts)
    plain = lazy is None or lazy.is_causal
    if whole and plain and call.columns == 1:
        return EVERYTHING

    def mask(start: int, stop: int) -> Tensor:
        device = store.device
        columns = torch.arange(start, stop, device=device)
        ends = column(store.lengths, device)[:, None]
        own_slot = ends - call.columns + columns[:, None]  # [B, T, 1]: the slot of the column's own token
        seen = (torch.arange(store.length, device=device) <= own_slot)[:, None]
        if not whole:
            counts = column(call.counts, device)[:, None]
            seen = seen & (columns[:, None] >= call.columns - counts)[:, None]
        alive = store.alive(device)
        if alive is not None:
            seen = seen & alive[:, :, None]
        if not plain:
            assert lazy is not None
            seen = seen & _evaluate(layer, lazy, columns)
        return seen

    one_each = call.columns == 1 and call.counts.count(1) == len(call.counts)
    return Visibility(whole and plain, mask, plain and one_each and not store.has_holes)


def _evaluate(layer: CacheLayer, lazy: LazyMask, columns: Tensor) -> Tensor:
    """transformers' rule at the kept tokens' own columns, padding counted as it counts it: [B, H or 1, T, S]."""
    cache, device = layer.cache, columns.device
    rows = torch.arange(cache.rows, device=device)[:, None, None, None]
    after = [seen + new for seen, new in zip(cache.seen_tokens, cache.call.counts, strict=True)]
    padding = column([cache.columns + cache.call.columns - seen for seen in after], device)
    kept = layer.store.current_positions(device) + padding[:, None]
    queries = (columns + cache.columns)[None, None, :, None]
    return lazy.rule(rows, torch.zeros_like(rows), queries, kept[:, :, None])
