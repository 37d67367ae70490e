"""The attention function registered with transformers. On every call, in every layer:

append (in `cache.update`), attend, observe, compress. A new token attends before anything is evicted or packed.
B batch, H KV heads, G query heads per KV head, T new tokens, S stored tokens, D head dim.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from kvcompress.cache_layer import CacheLayer, refuse_gradients
from kvcompress.errors import WrapError
from kvcompress.kernels import choose
from kvcompress.kernels.attention import naive, sdpa
from kvcompress.kernels.scores.naive import column_sums
from kvcompress.kernels.softmax import Softmax
from kvcompress.stores.store import Store
from kvcompress.turning import placed
from kvcompress.visibility import LazyMask, Visibility, lazy_mask, visibility

NAME = "kvcompress"


def attention(
    module: nn.Module,
    query: Tensor,  # [B, H * G, T, D], rotary applied
    key: CacheLayer | Tensor,
    value: CacheLayer | Tensor,
    attention_mask: LazyMask | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: output [B, T, H * G, D], and no weights."""
    if attention_mask is not None and not isinstance(attention_mask, LazyMask):
        raise WrapError(
            "a ready-made 4-D attention mask cannot be used with a compressed cache; pass the 2-D padding mask"
        )
    refuse_gradients(query)
    if scaling is None:
        scaling = 1 / math.sqrt(query.shape[-1])
    if isinstance(key, Tensor):
        assert isinstance(value, Tensor)
        return _without_cache(query, key, value, attention_mask, scaling, softcap, s_aux), None
    layer = key
    batch, heads, columns, dim = query.shape
    assert layer.shape is not None
    if layer.store.length == 0:  # nothing but padding so far, in every row
        return query.new_zeros(batch, columns, heads, layer.shape.value_dim), None
    grouped = query.view(batch, layer.shape.heads, heads // layer.shape.heads, columns, dim)
    softmax = Softmax(scaling, softcap, None if s_aux is None else s_aux.view(grouped.shape[1:3]))
    output, sums = attend(layer, grouped, visibility(layer, attention_mask), softmax)
    layer.observe(grouped, sums, softmax)
    layer.compress()
    if columns == 1:
        return output.reshape(batch, 1, heads, -1), None
    return output.flatten(1, 2).transpose(1, 2).contiguous(), None


def attend(layer: CacheLayer, query: Tensor, seen: Visibility, softmax: Softmax) -> tuple[Tensor, Tensor | None]:
    """Output [B, H, G, T, D] of `query` over all that `layer` stores, and the column sums if the method needs them."""
    store, front_query = placed(layer, query)
    if not layer.wants_scores:
        return over(query, store, seen, softmax, front_query), None
    if query.shape[3] <= choose.FEW_COLUMNS:
        ranges = store.ranges()
        mask = seen.kernel_mask(0, query.shape[3])
        fast = None if ranges is None else choose.attend_decode_with_sums(query, ranges, mask, softmax, front_query)
        return fast or naive.attend(query, store, seen.mask, softmax, True, front_query)
    return over(query, store, seen, softmax, front_query), _column_sums(query, store, seen, softmax, front_query)


def _column_sums(query: Tensor, store: Store, seen: Visibility, softmax: Softmax, front_query: Tensor | None) -> Tensor:
    """Column sums of a prompt in a pass of their own: the output then is the one that plain attention gives."""
    plain = store.plain()
    if plain is not None and seen.causal:
        past = store.length - query.shape[3]
        fast = choose.column_sums(query, plain[0], past, softmax)
        if fast is not None:
            return fast
    return column_sums(query, store, seen.mask, softmax, front_query)


def over(query: Tensor, store: Store, seen: Visibility, softmax: Softmax, front_query: Tensor | None = None) -> Tensor:
    """Output [B, H, G, T, D] of `query` over all of `store`, by the fastest kernel that takes the case."""
    plain = store.plain()
    torch_can = plain is not None and softmax.plain
    few = query.shape[3] <= choose.FEW_COLUMNS
    if plain is None or (few and not (torch_can and not choose.decode_pays(query, plain[0]))):
        fast = _in_blocks(query, store, seen, softmax, front_query)
        if fast is not None:
            return fast
    if plain is not None and torch_can:
        if seen.causal:
            return sdpa.causal(query, *plain, scaling=softmax.scaling)
        return sdpa.masked(query, *plain, seen.mask, scaling=softmax.scaling)
    return naive.attend(query, store, seen.mask, softmax, front_query=front_query)[0]


def _in_blocks(
    query: Tensor, store: Store, seen: Visibility, softmax: Softmax, front_query: Tensor | None
) -> Tensor | None:
    """The output by the decode kernels, a block of columns at a time; None where there is none for the case."""
    columns, at_once = query.shape[3], choose.most_columns(query)
    ranges = store.ranges() if at_once else None
    if ranges is None:
        return None
    outputs = []
    for start in range(0, columns, at_once):
        stop = min(start + at_once, columns)
        block, mask = query[..., start:stop, :], seen.kernel_mask(start, stop)
        front = None if front_query is None else front_query[..., start:stop, :]
        output = choose.attend_decode(block, ranges, mask, softmax, front)
        if output is None:
            return None
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 3)


def _without_cache(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lazy: LazyMask | None,
    scaling: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Plain attention over ordinary tensors: a call that was given no cache of ours."""
    store = Store(keys.shape[0])
    store.append(keys, values, [keys.shape[2]] * keys.shape[0])
    grouped = query.unflatten(1, (keys.shape[1], -1))
    mask = None if lazy is None else lazy.materialise()
    softmax = Softmax(scaling, softcap, None if s_aux is None else s_aux.view(grouped.shape[1:3]))
    if mask is None:
        past = keys.shape[2] - query.shape[2]
        mask = torch.ones(query.shape[2], keys.shape[2], dtype=torch.bool, device=query.device).tril(past)[None, None]
    output, _ = naive.attend(grouped, store, lambda start, stop: mask[:, :, start:stop], softmax)
    return output.flatten(1, 2).transpose(1, 2).contiguous()


def configs_of(model: nn.Module) -> list[Any]:
    """Every configuration in `model` that says which attention function its modules take."""
    found = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return [config for config in found.values() if hasattr(config, "_attn_implementation_internal")]


def register() -> None:
    """Makes `attn_implementation="kvcompress"` known to transformers."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lazy_mask)
