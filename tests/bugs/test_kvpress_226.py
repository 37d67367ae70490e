"""NVIDIA/kvpress #226 and #227: where scores were tied, tokens of the protected window were evicted in their place.

The kind: what a method always keeps does not depend on any score, and ties go to the lowest position.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

import kvcompress as kvc
from kvcompress.methods.view import LayerView
from kvcompress.stores.store import Store
from tests.bugs.common import left_padding, text
from tests.families import OPTIONS, build


def uniform() -> PreTrainedModel:
    """A model whose every query looks at all keys alike."""
    model = build("llama", **OPTIONS["llama"])
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.zero_()
    return model


@pytest.mark.parametrize("pooling", ["max", "avg"])
@pytest.mark.parametrize("kernel", [1, 5])
@pytest.mark.parametrize("window", [1, 4, 11, 12])
def test_under_uniform_attention_snapkv_keeps_its_window(window: int, kernel: int, pooling: str) -> None:
    ids, mask = text(2, 40), left_padding(40, 0, 15)
    with kvc.wrap(uniform(), f"snapkv(budget=12, window={window}, kernel={kernel}, pooling={pooling!r})") as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids, mask, cache)
    for layer in range(2):
        for row, tokens in ((0, 40), (1, 25)):
            for kept in cache.kept(layer)[row].tolist():
                assert kept[12 - window :] == list(range(tokens - window, tokens))
                if pooling == "max":
                    assert kept[: 12 - window] == list(range(12 - window))


def test_under_uniform_attention_h2o_keeps_its_recent_tokens() -> None:
    ids = text(1, 40)
    with kvc.wrap(uniform(), "h2o(heavy=5, recent=7)") as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids, cache=cache)
        for column in range(12):
            wrapped(ids[:, column : column + 1], cache=cache)
    assert cache.kept(1)[0].tolist() == [[0, 1, 2, 3, 4, *range(45, 52)]] * 2


@given(st.data())
def test_what_is_always_kept_is_kept_whatever_the_votes(data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, 12))
    vote = st.sampled_from([0.0, 1.0, 1.0, 2.0, 1e30])
    votes = data.draw(st.lists(vote, min_size=slots, max_size=slots))
    always = data.draw(st.lists(st.booleans(), min_size=slots, max_size=slots))
    count = data.draw(st.integers(0, slots + 2))
    store = Store(1)
    store.append(torch.zeros(1, 1, slots, 2), torch.zeros(1, 1, slots, 2), [slots])
    view = LayerView(store, [slots], lambda _: 0)
    found = view.top(torch.tensor([[votes]]), [count], torch.tensor([[always]]))

    expected = {slot for slot in range(slots) if always[slot]}
    others = sorted(set(range(slots)) - expected, key=lambda slot: (-votes[slot], slot))
    expected |= set(others[: max(0, count - len(expected))])
    assert {slot for slot in range(slots) if found[0, 0, slot]} == expected
