"""No gradient flows through a compressed cache: it is refused wherever it comes from, and the cache is as it was."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvcompress as kvc
from kvcompress import WrapError
from tests.bugs.common import METHODS, text
from tests.families import OPTIONS, build, tiny

IDS = text(1, 20)


def by_embeddings(model: PreTrainedModel, over: dict[str, kvc.CompressedCache]) -> Tensor:
    return model(inputs_embeds=model.get_input_embeddings()(IDS).requires_grad_(), **over).logits


def by_a_hook(model: PreTrainedModel, over: dict[str, kvc.CompressedCache]) -> Tensor:
    """A soft prompt that a hook adds behind our own hooks."""
    hook = model.get_submodule("model.layers.0.input_layernorm").register_forward_hook(
        lambda module, given, out: out + torch.zeros(out.shape[-1], requires_grad=True)
    )
    try:
        return model(IDS, **over).logits
    finally:
        hook.remove()


def by_a_weight(model: PreTrainedModel, over: dict[str, kvc.CompressedCache]) -> Tensor:
    weight = model.get_submodule("model.layers.1.self_attn.q_proj").requires_grad_()
    try:
        return model(IDS, **over).logits
    finally:
        weight.requires_grad_(False)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("feed", [by_embeddings, by_a_hook, by_a_weight])
@pytest.mark.parametrize("filled", [False, True])
def test_a_gradient_is_refused_and_the_cache_is_as_it_was(
    method: str, feed: Callable[[PreTrainedModel, dict[str, kvc.CompressedCache]], Tensor], filled: bool
) -> None:
    with kvc.wrap(tiny("llama"), method) as wrapped:
        cache, other = wrapped.new_cache(), wrapped.new_cache()
        for each in (cache, other) if filled else ():
            wrapped.prefill(IDS, cache=each)
        with pytest.raises(WrapError, match="gradients do not flow through a compressed cache"):
            feed(wrapped.model, {wrapped.cache_name: cache})
        found, expected = (wrapped(text(1, 15, seed=2), cache=each).logits for each in (cache, other))
        assert torch.equal(found, expected)
        assert torch.equal(cache.kept(1), other.kept(1))


@pytest.mark.filterwarnings("ignore:the wrapped model was called without a compressed cache")
def test_without_a_cache_too() -> None:
    with kvc.wrap(build("llama", **OPTIONS["llama"]), "exact") as wrapped, pytest.raises(WrapError, match="gradients"):
        by_embeddings(wrapped.model, {})
