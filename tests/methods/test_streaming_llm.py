"""StreamingLLM against worked values: what is attended to and kept, and at which rotary positions."""

import math

import pytest
import torch
from torch import Tensor

import kvcompress as kvc
from kvcompress.rope import Rotary
from kvcompress.turning import placed
from tests.methods.one_layer import OneLayer, golden

GOLDEN = golden("streaming_llm")


def turned(position: int) -> Tensor:
    """The raw vector (1, 0) at a position, one rotary pair that turns by one radian: [1, 1, 1, 2]."""
    return torch.tensor([[[[math.cos(position), math.sin(position)]]]])


@pytest.mark.parametrize("positions", ["cache", "original"])
def test_golden_kept_tokens_and_logits(positions: str) -> None:
    method = kvc.StreamingLLM(GOLDEN["sinks"], GOLDEN["window"], positions=positions)  # pyright: ignore
    rotary = Rotary(torch.ones(1)) if positions == "cache" else None
    layer = OneLayer(method, rotary)
    logits = torch.empty(0)
    for step in GOLDEN["steps"]:
        token = step["token"]
        query = turned(layer.cache.first_position()[0] if layer.cache.rows else 0)
        attended = [*(layer.kept[0] if token else []), token]
        assert attended == step["attended"]
        probe = layer.cache.fork() if token else None
        if probe is not None:
            probe.begin_call(1, [1])
            probe.layers[0].update(turned(token), turned(token))
            store, front = placed(probe.layers[0], query[:, :, None])
            logits = store.logits(query, None if front is None else front[:, :, 0])[0, 0, 0] / 2**0.5
        layer.call(query, turned(token), scaling=2**-0.5)
        assert layer.kept == [step["kept"]]
    expected = torch.tensor(GOLDEN[f"logits_token9_positions_{positions}"])
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-6)


def test_a_budget_is_the_window_and_the_sinks() -> None:
    for text, kept in (
        ("streaming_llm(sinks=2, budget=6)", [0, 1, 6, 7, 8, 9]),
        ("streaming_llm(sinks=2, budget=0.5)", [0, 1, 7, 8, 9]),
        ("streaming_llm(sinks=0, window=3)", [7, 8, 9]),
        # No more than the sinks: that many last tokens.
        ("streaming_llm(sinks=4, budget=0.3)", [7, 8, 9]),
        ("streaming_llm(sinks=4, budget=0.01)", [9]),
    ):
        layer = OneLayer(text)
        layer.call(torch.zeros(1, 1, 10, 2), torch.zeros(1, 1, 10, 2))
        assert layer.kept == [kept], text


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": -1},
        {"sinks": 1.0},
        {"window": 0},
        {"window": 0.5},
        {"window": 8, "budget": 12},
        {"budget": 4},
        {"budget": 0.0},
        {"budget": -3},
        {"positions": "slots"},
    ],
)
def test_wrong_options_name_the_value(options: dict[str, object]) -> None:
    with pytest.raises(ValueError) as error:
        kvc.StreamingLLM(**options)  # pyright: ignore[reportArgumentType]
    assert repr(list(options.values())[-1]) in str(error.value)
