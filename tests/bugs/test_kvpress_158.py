"""NVIDIA/kvpress #158: after an eviction the next tokens got positions counted from what was kept.

The kind: with `positions="original"` every token, before and after any eviction, has its true position. In a model of
one layer the KV of a token depends on the token and its position alone, so the plain model given the kept tokens and
their true positions must say the same.
"""

import pytest
import torch

import kvcompress as kvc
from tests.bugs.common import H2O, SNAPKV, STREAMING_ORIGINAL, one_layer, text
from tests.oracle import oracle, recording


@pytest.mark.parametrize("method", ["exact", STREAMING_ORIGINAL, "snapkv(budget=12, window=12)"])
def test_tokens_have_their_true_positions_after_evictions(method: str) -> None:
    model, ids, fed = one_layer(), text(1, 60), 0
    seen = []
    with kvc.wrap(model, method) as wrapped:
        cache = wrapped.new_cache()
        for columns, prompt in ((30, True), (1, False), (6, False), (12, True), (1, False), (1, False)):
            kept, part = cache.kept(0), ids[:, fed : fed + columns]
            output = wrapped.prefill(part, cache=cache) if prompt else wrapped(part, cache=cache)
            if fed:
                assert torch.equal(kept[:, 0], kept[:, 1])
                seen.append((torch.cat([kept[0, 0], torch.arange(fed, fed + columns)]), output.logits[0, -1]))
            fed += columns
            assert cache.seen.tolist() == [fed]
    for positions, logits in seen:
        with torch.no_grad():
            plain = model(ids[:, positions], position_ids=positions[None]).logits[0, -1]
        assert (plain - logits).abs().max() <= 1e-4 * plain.abs().max()


@pytest.mark.parametrize("method", [H2O, SNAPKV])
def test_so_they_have_where_the_heads_keep_different_tokens(method: str) -> None:
    model, ids = one_layer(), text(1, 60)
    with kvc.wrap(model, method) as wrapped, recording(wrapped) as calls:
        cache = wrapped.new_cache()
        wrapped.prefill(ids[:, :40], cache=cache)
        for column in range(40, 60):
            wrapped(ids[:, column : column + 1], cache=cache)
    assert not bool((cache.kept(0)[:, 0] == cache.kept(0)[:, 1]).all())
    assert oracle(model, calls).error(calls) < 1e-4
