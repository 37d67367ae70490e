"""A method that keeps different numbers of tokens in the KV heads: the rest is freed, and nothing else changes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import kvcompress as kvc
from kvcompress.methods import Acts, Evicting, LayerView
from kvcompress.methods.base import registry
from kvcompress.rope import rotaries
from tests.families import tiny
from tests.oracle import oracle, recording
from tests.reachable import reachable_bytes
from tests.turns import PACK4, Script, scripts

MODEL = tiny("llama")
HEADS, DIM, LAYERS = 2, 16, 2
TURNING = rotaries(MODEL)


@dataclass(frozen=True)
class ByHead(Evicting):
    """The longest keys, `first` of the prompt in KV head 0 and `other` of it in the others."""

    first: float = 0.2
    other: float = 0.6

    name: ClassVar[str] = "by_head"
    acts: ClassVar[Acts] = "prefill"

    def keep(self, layer: LayerView) -> Tensor:
        norms = layer.keys.float().norm(dim=-1)
        few, many = (layer.top(norms, layer.tokens(share)) for share in (self.first, self.other))
        return torch.where((torch.arange(norms.shape[1]) == 0)[:, None], few, many)


del registry["by_head"]


@pytest.fixture(autouse=True, scope="module")
def known_here_alone() -> Iterator[None]:
    registry["by_head"] = ByHead
    yield
    del registry["by_head"]


def counted(share: float, tokens: int) -> int:
    return max(1, int(share * tokens + 1e-9))


@pytest.mark.parametrize("method", ["by_head", "by_head(positions='cache')", f"by_head | {PACK4}"])
@given(script=scripts())
@settings(max_examples=10)
def test_logits_are_those_of_the_masked_plain_model(method: str, script: Script) -> None:
    with kvc.wrap(MODEL, method) as wrapped, recording(wrapped) as calls:
        cache = wrapped.new_cache()
        script.play(wrapped, cache)
    told = oracle(MODEL, calls, TURNING if wrapped.method.position_mode == "cache" else None)
    assert told.error(calls) < 1e-4
    assert cache.nbytes == reachable_bytes(cache, [MODEL, cache.rotaries]) == sum(cache.memory().values())


@given(script=scripts(turns=1))
@settings(max_examples=10)
def test_as_many_stay_as_each_head_was_given(script: Script) -> None:
    with kvc.wrap(MODEL, "by_head") as wrapped:
        cache = wrapped.new_cache()
        script.play(wrapped, cache)
    after = sum(script.turns[0].decoding)
    for layer in range(LAYERS):
        held = (cache.kept(layer) >= 0).sum(-1)
        for row, padding in enumerate(script.padding):
            prompt = script.turns[0].prompt - padding
            assert held[row].tolist() == [counted(0.2, prompt) + after, counted(0.6, prompt) + after]


def test_what_a_head_does_not_keep_takes_no_bytes() -> None:
    ids = torch.randint(3, 60, (1, 400), generator=torch.Generator().manual_seed(0))
    with kvc.wrap(MODEL, "by_head(first=0.1, other=0.9)") as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids, cache=cache)
    sizes, kept = cache.memory(), 40 + 360
    assert sizes["keys"] == sizes["values"] == LAYERS * kept * DIM * 4
    assert sizes["positions"] == LAYERS * (HEADS * 360 * 4 + 6 * HEADS * 8)  # a position a slot, and where heads begin


@pytest.mark.parametrize("method", ["by_head", f"by_head | {PACK4}"])
@given(script=scripts(turns=1))
@settings(max_examples=5)
def test_forks_and_files_go_on_as_the_cache_itself(
    method: str, script: Script, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path: Path = tmp_path_factory.mktemp("saved") / "cache"
    later = torch.randint(3, 60, (len(script.padding), 5), generator=torch.Generator().manual_seed(1))
    with kvc.wrap(MODEL, method) as wrapped:
        cache = wrapped.new_cache()
        script.play(wrapped, cache)
        fork, other = cache.fork(), cache.fork(2)
        order = torch.arange(len(script.padding)).flip(0)
        other.reorder_cache(torch.cat([2 * order, 2 * order + 1]))
        cache.save(path)
        loaded = kvc.load_cache(path, MODEL)
        expected = wrapped(later, cache=cache).logits
        assert torch.equal(wrapped(later, cache=fork).logits, expected)
        torch.testing.assert_close(wrapped(later, cache=loaded).logits, expected, rtol=1e-5, atol=1e-5)
        twice = wrapped(later.flip(0).repeat(2, 1), cache=other).logits
        torch.testing.assert_close(twice, expected.flip(0).repeat(2, 1, 1), rtol=1e-4, atol=1e-4)
