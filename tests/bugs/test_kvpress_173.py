"""NVIDIA/kvpress #173: the kept set came back in the order of the scores, so a later compression evicted the sinks.

The kind: whatever is evicted, how often and by whom, slots stay in the order of the text and hold the tokens they say.
"""

import pytest
import torch

import kvcompress as kvc
from tests.bugs.common import EVICTING, H2O, KIVI, SNAPKV, STREAMING, STREAMING_ORIGINAL, plain_keys, text
from tests.families import OPTIONS, build, tiny

STEPS = [("prompt", 25), ("call", 1), ("prompt", 18), ("call", 1), ("call", 7), ("prompt", 9), ("call", 1), ("call", 1)]


@pytest.mark.parametrize("method", [*EVICTING, f"{SNAPKV} | {KIVI}", f"h2o(heavy=8, recent=8) | {KIVI}"])
def test_every_compression_leaves_the_tokens_in_order_and_in_their_slots(method: str) -> None:
    model, ids = tiny("llama"), text(2, sum(columns for _, columns in STEPS))
    keys = plain_keys(model, ids)
    with kvc.wrap(model, method) as wrapped:
        cache, fed = wrapped.new_cache(), 0
        for step, columns in STEPS:
            part, fed = ids[:, fed : fed + columns], fed + columns
            wrapped.prefill(part, cache=cache) if step == "prompt" else wrapped(part, cache=cache)
            for layer in range(2):
                kept = cache.kept(layer)
                assert (kept >= 0).all() and (kept.diff() > 0).all(), (step, fed)
                assert (kept[..., -4:] == torch.arange(fed - 4, fed)).all()
            if "kivi" not in method:
                kept, stored = cache.kept(0), cache.layers[0].store.keys
                torch.testing.assert_close(stored, keys.gather(2, kept[..., None].expand_as(stored)))


@pytest.mark.parametrize("method", [STREAMING, STREAMING_ORIGINAL])
def test_the_sinks_outlive_every_compression(method: str) -> None:
    ids = text(1, 90)
    with kvc.wrap(tiny("llama"), method) as wrapped:
        cache = wrapped.new_cache()
        for turn in range(6):
            wrapped.prefill(ids[:, turn * 15 : turn * 15 + 15], cache=cache)
            end = turn * 15 + 15
            for layer in range(2):
                assert cache.kept(layer)[0].tolist() == [[0, 1, 2, *range(end - 9, end)]] * 2


def test_a_heavy_hitter_at_the_start_outlives_every_compression() -> None:
    """Under uniform attention an older token has been seen by more queries."""
    model = build("llama", **OPTIONS["llama"])
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.zero_()
    ids = text(1, 70)
    with kvc.wrap(model, H2O) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids[:, :40], cache=cache)
        for column in range(40, 70):
            wrapped(ids[:, column : column + 1], cache=cache)
            for layer in range(2):
                assert cache.kept(layer)[0].tolist() == [[*range(6), *range(column - 5, column + 1)]] * 2
