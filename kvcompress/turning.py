"""Attention under `positions="cache"`, where a token's rotary position is its slot; no stored key is written for it.

Keys that older tokens were evicted behind stand further forward than they were rotated for. Where these are first
tokens that a store holds apart (StreamingLLM's sinks), all of a row by the same distance Δ, the query is rotated
instead: R(p)q · R(a+Δ)k = R(p−Δ)q · R(a)k. Elsewhere, and for many queries, keys are rotated in a copy that lasts for
one layer's attention. B rows, H KV heads, G query heads per KV head, T columns, S slots, D head dim.
"""

import torch
from torch import Tensor

from kvcompress.cache_layer import CacheLayer
from kvcompress.kernels.choose import FEW_COLUMNS
from kvcompress.rope import Rotary
from kvcompress.stores.slots import column
from kvcompress.stores.store import Store


def placed(layer: CacheLayer, query: Tensor) -> tuple[Store, Tensor | None]:
    """The store that `query` [B, H, G, T, D] attends to, and the query to use before its front, if it is another."""
    store, rotary = layer.store, layer.rotary
    evicting = layer.cache.method.evicting
    if rotary is None or store.positions is None or not layer.compresses:
        return store, None
    if evicting is None or evicting.acts != "every_call":
        return store, None
    if any(store.open.fronts):
        distance = _distance(store)
        if store.packs is not None or query.shape[3] <= FEW_COLUMNS:
            return store, rotary.rotate(query.flatten(1, 2), -distance).view_as(query)
        if isinstance(distance, int):
            distance = torch.tensor(distance, device=store.device)
        return _turned(store, rotary, distance.expand(store.rows, 1, store.open.front_size)), None
    delta = _distances(store)
    if evicting.slots_before_gaps is not None:
        count = min(evicting.slots_before_gaps, store.length)
    elif delta.device.type == "cpu":
        count = int((delta > 0).any(1).any(0).sum())
    else:  # a turn by 0 changes nothing; asking the device would stop its stream
        count = store.length
    return (_turned(store, rotary, delta[..., :count]) if count else store), None


def _distance(store: Store) -> Tensor | int:
    """How many tokens were evicted behind a row's front: one number for all rows, or [B, 1, 1]."""
    if store.packs is None:
        rows = zip(store.seen, store.lengths, store.open.origins, strict=True)
        gone = [seen - length - before for seen, length, before in rows]
        return gone[0] if gone.count(gone[0]) == len(gone) else column(gone, store.device)[:, None]
    positions = store.current_positions(store.device)
    held = (positions >= 0).sum(-1, keepdim=True)
    return (column(store.seen, store.device)[:, None] - positions[..., :1] - held)[:, :1]


def _distances(store: Store) -> Tensor:
    """How far each slot's token stands behind its slot: int64 [B, H or 1, S]."""
    positions = store.current_positions(store.device)
    held = positions >= 0
    behind = held.flip(-1).long().cumsum(-1).flip(-1)
    return (column(store.seen, store.device)[:, None] - positions - behind).masked_fill(~held, 0)


def _turned(store: Store, rotary: Rotary, delta: Tensor) -> Store:
    """The same tokens for one attention, the keys of the first slots rotated by `delta` [B, H or 1, K]."""
    count = delta.shape[-1]
    keys = store.whole(0)
    keys = torch.cat([rotary.rotate(keys[:, :, :count], delta), keys[:, :, count:]], 2)
    return store.with_keys(keys)
