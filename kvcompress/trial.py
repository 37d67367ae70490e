"""Whether a model really runs over a compressed cache: a few tokens are fed through it when it is first wrapped.

What a model does with its cache and masks is written nowhere but in its forward passes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kvcompress.attention import attention, configs_of
from kvcompress.cache import CompressedCache
from kvcompress.cache_layer import CacheLayer
from kvcompress.compat import cache_argument
from kvcompress.decoder import evaluating
from kvcompress.errors import CacheError, WrapError
from kvcompress.inputs import call_arguments, check_fed, prepare
from kvcompress.methods.exact import Exact
from kvcompress.rope import frequencies, ordinary_token
from kvcompress.visibility import LazyMask, lazy_mask

NAME = "kvcompress_trial"

_passed: WeakSet[PreTrainedModel] = WeakSet()


def check_runs(model: PreTrainedModel, decoder: nn.Module, windows: list[int | None]) -> None:
    """Raises WrapError for a model that computes on cached keys itself, looks ahead, or makes its own masks.

    `decoder` and `windows` are those of `decoder_of` and `layer_windows`. A model is tried once.
    """
    if model in _passed or model._compiled_call_impl is not None:  # a compiled one is refused when it is entered
        return
    cache, attended = CompressedCache(Exact(), windows, identity=""), set[int]()
    token = ordinary_token(model.config.get_text_config(decoder=True))
    ids = torch.full((1, 2), token, device=model.device)
    name = f"{type(model).__name__} ({model.config.model_type})"
    try:
        with evaluating(model), torch.no_grad():
            with _prepared(decoder, cache), _watched(model, attended):
                for part in (ids, ids[:, :1]):  # a prompt, then decoding
                    model(input_ids=part, use_cache=True, **{cache_argument(model.forward): cache})
                    check_fed(cache)
                    cache.end_call()
            if not frequencies(model):  # with rotary only distances matter
                _check_positions(model, ids)
    except torch.OutOfMemoryError:
        raise
    except (WrapError, CacheError) as error:
        raise WrapError(f"{name} cannot run over a compressed cache: {error}") from None
    except Exception as error:
        untouched = {layer.index for layer in cache.layers if not layer.store.empty} <= attended
        reason = (
            "a call of one or two tokens failed"
            if untouched
            else "it computes on the cached keys or values itself, before transformers' attention interface gets them"
        )
        raise WrapError(f"{name} cannot run over a compressed cache: {reason} ({error})") from error
    _passed.add(model)


@contextmanager
def _prepared(decoder: nn.Module, cache: CompressedCache) -> Iterator[None]:
    """Calls of `decoder` get the positions and the mask that the cache knows."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = call_arguments(module, args, kwargs)
        _check_given(arguments.get("attention_mask"))
        return (), prepare(cache, arguments, None)

    hook = decoder.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _check_given(mask: Any) -> None:
    """The call had no mask, so what the decoder is given is the model's own."""
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        what = f"of {mask.dim()} dimensions" if isinstance(mask, Tensor) else f"as a {type(mask).__name__}"
        raise WrapError(
            f"it makes the attention mask of its decoder itself, {what}, where the cache knows 2-D padding; "
            "a text-only model of the family (AutoModelForCausalLM) may run"
        )


def _check_positions(model: PreTrainedModel, ids: Tensor) -> None:
    """Raises WrapError unless the positions that the model counts itself begin at 0, as a cache counts them."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    own = model(input_ids=ids, use_cache=False).logits
    counted = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    if not torch.allclose(own, counted, rtol=0, atol=0, equal_nan=True):
        raise WrapError("its positions do not begin at 0, where a compressed cache begins to count")


@contextmanager
def _watched(model: PreTrainedModel, attended: set[int]) -> Iterator[None]:
    """Every layer's attention is checked to be causal; `attended` gets the layers that come to it."""

    def watched(module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
        if isinstance(key, CacheLayer):
            attended.add(key.index)
            if value is not key:
                raise WrapError(f"layer {key.index} attends with the keys of one layer and the values of another")
            if _looks_ahead(module, attention_mask, options.get("is_causal"), query.device):
                raise WrapError(
                    f"the attention of layer {key.index} is bidirectional: a token sees those behind it, so that no "
                    "cache can serve it; a BERT is a decoder with is_decoder=True in its configuration"
                )
        return attention(module, query, key, value, attention_mask, **options)

    AttentionInterface.register(NAME, watched)
    AttentionMaskInterface.register(NAME, lazy_mask)
    before = [(config, config._attn_implementation_internal) for config in configs_of(model)]
    try:
        for config, _ in before:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own


def _looks_ahead(module: nn.Module, mask: Any, is_causal: bool | None, device: torch.device) -> bool:
    """Whether the first token sees the second."""
    if mask is None:
        return not (is_causal if is_causal is not None else getattr(module, "is_causal", True))
    if not isinstance(mask, LazyMask):
        return False
    first = torch.zeros((), dtype=torch.int64, device=device)
    return bool(mask.rule(first, first, first, first + 1))
