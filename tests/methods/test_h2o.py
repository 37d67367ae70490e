"""H2O against worked values: scores from given probabilities, what stays, and how scores follow their tokens."""

import pytest
import torch
from torch import Tensor

import kvcompress as kvc
from tests.methods.one_layer import OneLayer, attending_as, golden, one_hot_keys

GOLDEN = golden("h2o")
DIM = 16
PROMPT = list(range(6))
METHOD = kvc.H2O(heavy=GOLDEN["heavy"], recent=GOLDEN["recent"])


def prefill(layer: OneLayer, heads: list[str], kv_heads: int) -> None:
    probabilities = torch.stack([torch.tensor(GOLDEN["prefill_probabilities"][head]) for head in heads])
    layer.call(attending_as(probabilities, PROMPT, DIM)[None], one_hot_keys(PROMPT, kv_heads, DIM))


def scores(layer: OneLayer, head: int = 0) -> Tensor:
    return layer.layer.store.scores.view[0, head]


def test_golden_scores_and_kept_tokens_after_prefill() -> None:
    layer = OneLayer(METHOD)
    prefill(layer, ["h0", "h1"], kv_heads=2)
    for head, name in enumerate(("h0", "h1")):
        kept = GOLDEN["kept_per_query_head"][name]
        assert layer.kept[head] == kept
        expected = torch.tensor(GOLDEN["prefill_scores"][name])[kept]
        torch.testing.assert_close(scores(layer, head), expected, rtol=0, atol=1e-5)


def test_golden_query_heads_of_one_group_are_averaged() -> None:
    layer = OneLayer(METHOD)
    prefill(layer, ["h0", "h1"], kv_heads=1)
    assert layer.kept == [GOLDEN["kept_as_one_gqa_group"]["sum_or_mean"]]


def test_golden_decoding() -> None:
    layer = OneLayer(METHOD)
    prefill(layer, ["h0"], kv_heads=1)
    for step in GOLDEN["decode_h0"]:
        stored = [*layer.kept[0], step["token"]]
        query = attending_as(torch.tensor(step["probabilities"]), stored, DIM)
        layer.call(query[None, None, None], one_hot_keys([step["token"]], 1, DIM))
        assert layer.kept == [step["kept"]]
        torch.testing.assert_close(scores(layer), torch.tensor(step["scores"]), rtol=0, atol=1e-5)


def test_equal_scores_keep_the_lowest_positions() -> None:
    layer = OneLayer("h2o(heavy=3, recent=2)")
    zeros = torch.zeros(1, 1, 1, DIM)
    for token in range(9):
        layer.call(zeros, one_hot_keys([token], 1, DIM))
    # With uniform attention the oldest tokens gather the most; among equals the lowest position stays.
    assert layer.kept == [[0, 1, 2, 7, 8]]


def test_heavy_and_recent_are_budgets_or_halves_of_one() -> None:
    for text, kept in (
        ("h2o(budget=5)", 5),
        ("h2o(heavy=0.2, recent=0.1)", 3),
        ("h2o(budget=0.5)", 5),
        ("h2o(heavy=0.01, recent=2)", 3),
    ):
        layer = OneLayer(text)
        layer.call(torch.zeros(1, 1, 10, DIM), one_hot_keys(list(range(10)), 1, DIM))
        assert len(layer.kept[0]) == kept, text
        assert layer.kept[0][-1] == 9


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heavy": 4},
        {"heavy": 4, "recent": 4, "budget": 8},
        {"heavy": 0, "recent": 4},
        {"heavy": 4, "recent": 1.5},
        {"heavy": "1kB", "recent": 4},
        {"budget": 1},
        {"budget": float("nan")},
        {"budget": 8, "positions": "slots"},
    ],
)
def test_wrong_options_name_the_value(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"h2o needs|not both|must be|must lie|less than"):
        kvc.H2O(**options)  # pyright: ignore[reportArgumentType]
