"""huggingface/transformers #35168: a cache whose layers differ in length got one mask for all of them, so a question of
several tokens after compression failed or saw what it should not.

The kind: layers of any lengths, each with its own rule, and a question of many tokens, with and without padding.
"""

import pytest
import torch

import kvcompress as kvc
from tests.bugs.common import KIVI, left_padding, text
from tests.families import tiny
from tests.oracle import oracle, recording

QUESTION = 12
SNAPKV = "snapkv(budget=20, window=4)"


@pytest.mark.parametrize("padding", [(0, 0), (0, 11)])
@pytest.mark.parametrize("method", ["exact", SNAPKV, "h2o(heavy=10, recent=10)", f"{SNAPKV} | {KIVI}"])
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "llama4_text"])
def test_a_question_after_compression_sees_in_each_layer_what_that_layer_may_show(
    family: str, method: str, padding: tuple[int, int]
) -> None:
    model, ids = tiny(family), text(2, 40 + QUESTION)
    with kvc.wrap(model, method) as wrapped, recording(wrapped) as calls:
        cache = wrapped.new_cache()
        wrapped.prefill(ids[:, :40], left_padding(40, *padding), cache)
        lengths = {cache.kept(layer).shape[2] for layer in range(len(cache.layers))}
        wrapped(ids[:, 40:], cache=cache)
    assert len(lengths) > 1
    assert oracle(model, calls).error(calls) < 1e-4


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("method", ["exact", SNAPKV, f"{SNAPKV} | kivi(bits=4, group_size=4, residual=32)"])
def test_twelve_tokens_at_once_are_twelve_tokens_one_by_one(method: str, family: str) -> None:
    """Where nothing is evicted or packed between them."""
    ids = text(2, 40 + QUESTION)
    with kvc.wrap(tiny(family), method) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids[:, :40], left_padding(40, 0, 11), cache)
        fork = cache.fork()
        at_once = wrapped(ids[:, 40:], cache=cache).logits
        steps = [wrapped(ids[:, 40 + step : 41 + step], cache=fork).logits for step in range(QUESTION)]
    one_by_one = torch.cat(steps, 1)
    if "kivi" in method:
        assert cache.layers[-1].store.state()["packed_values"] == fork.layers[-1].store.state()["packed_values"]
    assert (at_once - one_by_one).abs().max() <= 1e-4 * one_by_one.abs().max()
