"""FasterDecoding/SnapKV #23: nobody could tell what the cache holds once a generation outgrows the budget.

The kind: each method's docstring says what it holds while decoding, and the cache holds that.
"""

import inspect

import pytest
import torch

import kvcompress as kvc
from tests.bugs.common import H2O, KIVI, SNAPKV, STREAMING, text
from tests.families import tiny

PROMPT, NEW = 30, 30  # more new tokens than the budget of 12

SAYS = {
    "exact": "Keeps everything.",
    SNAPKV: "Decoding only appends: the cache holds `budget` tokens plus every token generated since,",
    STREAMING: "Acts on every call: a new token attends to all that is stored and itself, then the oldest beside the "
    "sinks goes.",
    H2O: "After prefill and after every call the top `heavy` of those older than the recent window stay.",
    KIVI: "are packed in steps of `residual` tokens in groups of `group_size` tokens (algorithm 1); values in groups "
    "of `min(group_size, D)` channels, all but the last `residual`.",
}


@pytest.mark.parametrize("method", SAYS)
def test_the_docstring_says_it(method: str) -> None:
    said = " ".join((inspect.getdoc(type(kvc.parse(method))) or "").split())
    assert SAYS[method] in said


@pytest.mark.parametrize("method", SAYS)
def test_the_cache_holds_what_the_docstring_says(method: str) -> None:
    ids = text(1, PROMPT + NEW)
    with kvc.wrap(tiny("llama"), method) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids[:, :PROMPT], cache=cache)
        chosen = [cache.kept(layer) for layer in range(2)]
        for seen in range(PROMPT + 1, PROMPT + NEW + 1):
            wrapped(ids[:, seen - 1 : seen], cache=cache)
            new = torch.arange(PROMPT, seen)
            for layer in range(2):
                kept = cache.kept(layer)
                if method == SNAPKV:
                    assert torch.equal(kept, torch.cat([chosen[layer], new.expand(1, 2, -1)], 2))
                elif method == STREAMING:
                    assert kept.tolist() == [[[0, 1, 2, *range(seen - 9, seen)]] * 2]
                elif method == H2O:
                    assert kept.shape[2] == 12
                    assert kept[..., 6:].tolist() == [[list(range(seen - 6, seen))] * 2]
                    assert set(kept[0, 0, :6].tolist()) <= set(chosen[layer][0, 0].tolist()) | set(range(PROMPT, seen))
                    chosen[layer] = kept
                else:
                    assert kept.tolist() == [[list(range(seen))] * 2]
                if method == KIVI:
                    state = cache.layers[layer].store.state()
                    assert state["packed_keys"] == [seen - seen % 8]
                    assert state["packed_values"] == [seen - 8]
