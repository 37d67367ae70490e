"""NVIDIA/kvpress #213: a method read `config.head_dim`, which many configurations do not have.

The kind: head counts and dims come from the keys themselves, whatever the configuration says or leaves out.
"""

import pytest
import torch
from transformers import PreTrainedModel

import kvcompress as kvc
from tests.bugs.common import GREEDY, METHODS, text
from tests.families import OPTIONS, build


def without_head_dim() -> PreTrainedModel:
    model = build("qwen2", **OPTIONS["qwen2"])
    assert not hasattr(model.config, "head_dim")
    return model


@pytest.mark.parametrize("method", [*METHODS, "snapkv(budget='6KiB', window=2)", "h2o(budget='6KiB')"])
def test_a_configuration_without_head_dim_will_do(method: str) -> None:
    model, ids = without_head_dim(), text(1, 30)
    with kvc.wrap(model, method) as wrapped:
        wrapped.generate(ids, **GREEDY)
        cache = wrapped.new_cache()
        wrapped.prefill(ids, cache=cache)
        used = cache.nbytes - cache.memory()["spare"]
    if "KiB" in method:
        assert used <= 6 * 1024
    full, sliding = 2 * 30, 2 * 8  # four layers, two of which slide over 9 tokens and keep 8
    assert cache.exact_nbytes == (full + sliding) * 2 * (16 + 16) * 4
    if method == "exact":
        assert used == cache.exact_nbytes + sum(4 * 8 for _ in range(2))  # and the positions of what slid out


@pytest.mark.parametrize("method", METHODS)
def test_keys_and_hidden_size_need_not_fit(method: str) -> None:
    """Two query heads of 48 dims in a model 32 wide, one KV head."""
    options = OPTIONS["llama"] | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 48}
    model, ids = build("llama", **options), text(1, 30)
    with torch.no_grad():
        expected = model.generate(ids, **GREEDY)
    with kvc.wrap(model, method) as wrapped:
        found = wrapped.generate(ids, **GREEDY)
        assert found.shape == (1, 36)
        assert wrapped.cache.exact_nbytes == 35 * 2 * (48 + 48) * 4
    if method == "exact":
        assert torch.equal(found, expected)
