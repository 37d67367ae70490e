"""NVIDIA/kvpress #16: rotary positions kept their gaps where tokens were evicted, and nothing could close them.

The kind: with `positions="cache"` kept tokens stand next to each other. In a model of one layer the plain model given
the kept tokens as its whole text, with positions 0, 1, 2, …, must say the same.
"""

import pytest
import torch

import kvcompress as kvc
from kvcompress.rope import rotaries
from tests.bugs.common import STREAMING, left_padding, one_layer, text
from tests.oracle import oracle, recording

STEPS = ((30, True), (1, False), (1, False), (5, False), (12, True), (1, False), (1, False))


def plain(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Logits of the last of the tokens at `positions`, which are all that the model is given."""
    with torch.no_grad():
        return one_layer()(ids[:, positions]).logits[0, -1]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    "method",
    [
        STREAMING,
        "streaming_llm(sinks=0, window=9)",
        "streaming_llm(sinks=5, budget=0.3)",
        "snapkv(budget=12, window=12, positions='cache')",
    ],
)
def test_slots_are_positions(method: str) -> None:
    ids, fed = text(1, 60), 0
    seen = []
    with kvc.wrap(one_layer(), method) as wrapped:
        cache = wrapped.new_cache()
        for columns, prompt in STEPS:
            part, kept = ids[:, fed : fed + columns], cache.kept(0)
            output = wrapped.prefill(part, cache=cache) if prompt else wrapped(part, cache=cache)
            if fed:
                assert torch.equal(kept[:, 0], kept[:, 1])
                seen.append((torch.cat([kept[0, 0], torch.arange(fed, fed + columns)]), output.logits[0, -1]))
            fed += columns
    for positions, logits in seen:
        assert_close(logits, plain(ids, positions))


def test_slots_are_positions_in_every_row_and_after_they_were_brought_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcompress.cache.REBASE_AFTER", 5)
    ids, mask, seen = text(2, 54), left_padding(30, 0, 7), []
    with kvc.wrap(one_layer(), STREAMING) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids[:, :30], mask, cache)
        for column in range(30, 54):
            kept = cache.kept(0)
            seen.append((column, kept, wrapped(ids[:, column : column + 1], cache=cache).logits[:, -1]))
        assert min(cache.turned_back) > 0
        assert cache.seen.tolist() == [54, 47]
    for column, kept, logits in seen:
        for row, padding in ((0, 0), (1, 7)):
            positions = torch.cat([kept[row, 0] + padding, torch.tensor([column])])
            assert_close(logits[row], plain(ids[row : row + 1], positions))


@pytest.mark.parametrize(
    "method", ["snapkv(budget=12, window=4, positions='cache')", "h2o(heavy=6, recent=6, positions='cache')"]
)
def test_so_they_are_where_the_heads_keep_different_tokens(method: str) -> None:
    model, ids = one_layer(), text(1, 46)
    with kvc.wrap(model, method) as wrapped, recording(wrapped) as calls:
        cache = wrapped.new_cache()
        wrapped.prefill(ids[:, :36], cache=cache)
        for column in range(36, 46):
            wrapped(ids[:, column : column + 1], cache=cache)
    assert not torch.equal(cache.kept(0)[:, 0], cache.kept(0)[:, 1])
    assert oracle(model, calls, rotaries(model)).error(calls) < 1e-4


def test_the_sinks_move_before_packed_keys_too() -> None:
    """Groups of one token and one channel lose nothing, so slots must be positions here as well."""
    ids = text(1, 60)
    with kvc.wrap(one_layer(), "streaming_llm(sinks=3, window=16) | kivi(bits=4, group_size=1, residual=1)") as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids[:, :40], cache=cache)
        kept = cache.kept(0)[0, 0]
        logits = wrapped(ids[:, 40:41], cache=cache).logits[0, -1]
    assert kept.tolist() == [0, 1, 2, *range(24, 40)]
    close = plain(ids, torch.cat([kept, torch.tensor([40])]))
    assert (logits - close).abs().max() <= 1e-2 * close.abs().max()  # minima are stored in half precision
