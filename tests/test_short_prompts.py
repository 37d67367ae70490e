"""Prompts of one token, and of as many as a method's window, budget or residual, less or more by one.

The truth is the plain model over transformers' own cache, its keys and values rounded by hand.
"""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvcompress as kvc
from tests.families import VOCABULARY, tiny

SNAPKV = "snapkv(budget=12, window=4)"
KIVI = "kivi(bits=2, group_size=8, residual=8)"
METHODS = ["streaming_llm(sinks=2, window=10)", "h2o(heavy=6, recent=6)", SNAPKV]


def text(columns: int) -> Tensor:
    return torch.randint(2, VOCABULARY, (1, columns), generator=torch.Generator().manual_seed(5))


def reference(ids: Tensor, quantised: int = 0, values: int = 0) -> Tensor:
    """Logits of the last of `ids` by the plain model over a DynamicCache of the others.

    Their first `quantised` keys and `values` values are rounded to two bits in groups of 8, as KIVI does.
    """
    model = tiny("llama")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
        for layer in cache.layers:
            keys = layer.keys[:, :, :quantised].unflatten(2, (-1, 8))
            layer.keys[:, :, :quantised] = rounded(keys, 3).flatten(2, 3)
            layer.values[:, :, :values] = rounded(layer.values[:, :, :values].unflatten(3, (-1, 8)), 4).flatten(3, 4)
        return model(ids[:, -1:], past_key_values=cache).logits


def rounded(x: Tensor, dim: int) -> Tensor:
    """Each group along `dim` on its own four levels, which are stored in half precision."""
    if not x.numel():
        return x
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = (high - low) / 3
    return ((x - low) / step).round() * step.half().float() + low.half().float()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("columns", "quantised", "values"),
    [(1, 0, 0), (7, 0, 0), (8, 8, 0), (9, 8, 1), (15, 8, 7), (16, 16, 8), (17, 16, 9)],
)
def test_kivi_packs_what_it_should_around_the_residual(columns: int, quantised: int, values: int) -> None:
    ids = text(columns + 1)
    expected = reference(ids, quantised, values)
    with kvc.wrap(tiny("llama"), KIVI) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids[:, :-1], cache=cache)
        assert cache.kept(0).tolist() == [[list(range(columns))] * 2]
        found = wrapped(ids[:, -1:], cache=cache).logits
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("columns", [1, 3, 4, 5, 11, 12])
@pytest.mark.parametrize("method", ["exact", *METHODS])
def test_a_prompt_within_the_budget_is_kept_whole(method: str, columns: int) -> None:
    """One token, the window less one, the window, one more, and up to the budget."""
    ids = text(columns + 1)
    expected = reference(ids)
    with kvc.wrap(tiny("llama"), method) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids[:, :-1], cache=cache)
        assert cache.kept(1).tolist() == [[list(range(columns))] * 2]
        found = wrapped(ids[:, -1:], cache=cache).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("method", [*METHODS, KIVI, f"{SNAPKV} | {KIVI}"])
def test_one_token_is_enough_to_generate_from(method: str) -> None:
    with kvc.wrap(tiny("llama"), "exact") as wrapped:
        expected = wrapped.generate(text(1), max_new_tokens=6, do_sample=False)
    with kvc.wrap(tiny("llama"), method) as wrapped:
        assert torch.equal(wrapped.generate(text(1), max_new_tokens=6, do_sample=False), expected)
