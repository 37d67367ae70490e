"""SnapKV against worked values: votes, pooling and what stays."""

import math

import pytest
import torch
from torch import Tensor

import kvcompress as kvc
from kvcompress.methods.snapkv import pool
from kvcompress.methods.view import LayerView
from tests.methods.one_layer import OneLayer, golden, one_hot_keys

GOLDEN = golden("snapkv")
TOKENS, DIM = 12, 4


def wave(function_of: str, head: int = 0) -> Tensor:
    """The golden file's queries (of one head) or keys: [T, D]."""
    t, d = torch.arange(TOKENS, dtype=torch.float64)[:, None], torch.arange(DIM, dtype=torch.float64)
    values = 2 * (0.7 * t + 1.3 * d).sin() if function_of == "key" else 2 * (0.5 * t + 0.9 * d + head).cos()
    return values.float()


def prefill(pooling: str, heads: list[int], kv_heads: int, budget: int = 7) -> OneLayer:
    layer = OneLayer(kvc.SnapKV(budget=budget, window=3, kernel=3, pooling=pooling))  # pyright: ignore
    query = torch.stack([wave("query", head) for head in heads])[None]
    layer.call(query, wave("key").expand(1, kv_heads, -1, -1), scaling=1 / math.sqrt(DIM))
    return layer


@pytest.mark.parametrize("pooling", ["avg", "max"])
def test_golden_kept_tokens(pooling: str) -> None:
    kept = GOLDEN["kept_query_head"]
    assert prefill(pooling, [0, 1], kv_heads=2).kept == [kept["h0"][pooling], kept["h1"][pooling]]
    assert prefill(pooling, [0, 1], kv_heads=1).kept == [GOLDEN["kept_gqa_mean_then_pool"][pooling]]


def test_golden_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("kvcompress.methods.base.registry", {})

    class Spy(kvc.SnapKV):
        name = "spy"

        def keep(self, layer: LayerView) -> Tensor:
            seen.append(layer.attention_of_last(self.window))
            return super().keep(layer)

    layer = OneLayer(Spy(budget=7, window=3, kernel=3))
    query = torch.stack([wave("query", head) for head in (0, 1)])[None]
    layer.call(query, wave("key").expand(1, 2, -1, -1), scaling=1 / math.sqrt(DIM))
    expected = torch.tensor([GOLDEN["votes"]["h0"], GOLDEN["votes"]["h1"]])
    torch.testing.assert_close(seen[0][0, :, :9], expected, rtol=0, atol=2e-6)


def test_golden_pooling() -> None:
    case = GOLDEN["pooling_case"]
    votes = torch.tensor(case["vote"])[None, None]
    for pooling in ("avg", "max"):
        pooled = pool(votes, case["kernel"], pooling)[0, 0]
        torch.testing.assert_close(pooled, torch.tensor(case[pooling]), rtol=0, atol=1e-6)
        best = pooled.sort(descending=True, stable=True).indices[:2].sort().values
        assert best.tolist() == case["top2"][pooling]
    assert pool(votes, 1, "max")[0, 0].topk(2).indices.sort().values.tolist() == case["top2"]["no_pool"]


def test_uniform_attention_keeps_the_window_and_the_lowest_positions() -> None:
    layer = OneLayer("snapkv(budget=8, window=4, kernel=3)")
    layer.call(torch.zeros(1, 2, 20, 32), one_hot_keys(list(range(20)), 2, 32))
    assert layer.kept == [[0, 1, 2, 3, 16, 17, 18, 19]] * 2


@pytest.mark.parametrize("length", range(1, 17))
def test_a_ratio_below_the_window_keeps_that_many_last_tokens(length: int) -> None:
    layer = OneLayer("snapkv(budget=0.25, window=32)")
    layer.call(torch.randn(1, 2, length, 32), torch.randn(1, 2, length, 32))
    kept = max(1, length // 4)
    assert layer.kept == [list(range(length - kept, length))] * 2


def test_decoding_only_appends() -> None:
    layer = prefill("max", [0, 1], kv_heads=2)
    before = layer.kept
    for token in range(3):
        layer.call(torch.randn(1, 2, 1, DIM), torch.randn(1, 2, 1, DIM))
        assert layer.kept == [head + list(range(TOKENS, TOKENS + token + 1)) for head in before]


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 31},
        {"budget": 0},
        {"budget": 1.5},
        {"budget": "12 parsecs"},
        {"budget": True},
        {"budget": 64, "window": 0},
        {"budget": 64, "kernel": 4},
        {"budget": 64, "kernel": 0},
        {"budget": 64, "pooling": "mean"},
        {"budget": 64, "positions": "slots"},
    ],
)
def test_wrong_options_name_the_value(options: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        kvc.SnapKV(**options)  # pyright: ignore[reportArgumentType]
    assert repr(list(options.values())[-1]) in str(error.value)
