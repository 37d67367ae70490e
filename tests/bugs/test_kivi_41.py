"""jy-yuan/KIVI #41: a prompt shorter than the residual failed in models with grouped queries.

The kind: from one token on, at every group count, nothing is packed too early, and decoding packs what a prefill of
as many tokens would have packed.
"""

import pytest
import torch
from transformers import PreTrainedModel

import kvcompress as kvc
from tests.bugs.common import KIVI, text
from tests.families import OPTIONS, build


def grouped(kv_heads: int, layers: int) -> PreTrainedModel:
    options = {"num_attention_heads": 8, "num_key_value_heads": kv_heads, "head_dim": 8, "num_hidden_layers": layers}
    return build("llama", **OPTIONS["llama"] | options)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_a_prompt_shorter_than_the_residual_is_exact(kv_heads: int) -> None:
    model, ids = grouped(kv_heads, 2), text(2, 9)
    with torch.no_grad():
        plain = model(ids).logits
    with kvc.wrap(model, KIVI) as wrapped:
        for columns in range(1, 8):
            cache = wrapped.new_cache()
            first = wrapped.prefill(ids[:, :columns], cache=cache).logits
            logits = torch.cat([first, wrapped(ids[:, columns:8], cache=cache).logits], 1)
            expected = plain[:, columns - 1 : 8]
            assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max(), columns
            assert cache.layers[0].store.state()["packed_keys"] == [8, 8]


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("start", [1, 7, 8, 9])
def test_decoding_packs_what_a_prefill_packs(start: int, kv_heads: int) -> None:
    """In a model of one layer no KV depends on attention, so the codes must be the same bits."""
    model, ids = grouped(kv_heads, 1), text(1, 26)
    with kvc.wrap(model, KIVI) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids[:, :start], cache=cache)
        for column in range(start, 26):
            wrapped(ids[:, column : column + 1], cache=cache)
            whole = wrapped.new_cache()
            wrapped.prefill(ids[:, : column + 1], cache=whole)
            store, expected = cache.layers[0].store, whole.layers[0].store
            assert store.state() == expected.state()
            for name, tensor in expected.tensors().items():
                torch.testing.assert_close(store.tensors()[name], tensor, rtol=1e-3, atol=1e-5, msg=f"{column} {name}")
