"""`A | kivi`: A chooses as it would alone, over holes too, and what cannot be composed is refused."""

import pytest
import torch

import kvcompress as kvc
from kvcompress.methods.base import Method
from tests.families import VOCABULARY, tiny
from tests.oracle import oracle, recording
from tests.turns import Script, Turn, check_kept

MODEL = tiny("llama")
PACK = "kivi(bits=4, group_size=8, residual=8)"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "method",
    [
        f"snapkv(budget=40, window=6, kernel=5) | {PACK}",
        f"snapkv(budget=0.4, window=6, kernel=5, pooling='avg') | {PACK}",
        f"h2o(heavy=0.3, recent=0.2) | {PACK}",
        f"h2o(heavy=30, recent=8) | {PACK}",
        f"streaming_llm(sinks=2, budget=0.4, positions='original') | {PACK}",
        f"streaming_llm(sinks=2, window=20) | {PACK}",
    ],
)
def test_holes_change_no_choice(method: str, seed: int) -> None:
    turns = [Turn(70, None, [1, 9]), Turn(33, None, [1]), Turn(14, 5, [1, 1]), Turn(3, None, [2])]
    columns = sum(turn.prompt + sum(turn.decoding) for turn in turns)
    ids = torch.randint(3, VOCABULARY, (2, columns), generator=torch.Generator().manual_seed(seed))
    script = Script(ids, [0, 9], turns)
    had_holes = []
    with kvc.wrap(MODEL, method) as wrapped, recording(wrapped) as calls:
        cache = wrapped.new_cache()
        script.play(wrapped, cache, after=lambda _: had_holes.append(cache.layers[0].store.has_holes))
    told = oracle(MODEL, calls, wrapped.rotaries() if wrapped.method.position_mode == "cache" else None)
    assert told.error(calls) < 1e-4
    assert check_kept(wrapped.method, script, calls, cache, told)
    assert any(had_holes)


def test_a_composition_is_written_and_read_back() -> None:
    method = kvc.SnapKV(budget=0.25) | kvc.KIVI(bits=4, group_size=16)
    assert str(method) == "snapkv(budget=0.25) | kivi(bits=4, group_size=16)"
    assert kvc.parse(str(method)) == method
    assert hash(kvc.parse(str(method))) == hash(method)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (kvc.KIVI(), kvc.SnapKV(budget=64)),
        (kvc.Exact(), kvc.KIVI()),
        (kvc.KIVI(), kvc.KIVI()),
        (kvc.SnapKV(budget=64), kvc.H2O(budget=64)),
        (kvc.SnapKV(budget=64) | kvc.KIVI(), kvc.KIVI()),
    ],
)
def test_only_an_evicting_method_and_kivi_compose(first: Method, second: Method) -> None:
    with pytest.raises(TypeError, match="a composition is one evicting method, then one that packs, such as kivi"):
        _ = first | second


@pytest.mark.parametrize(
    "first",
    [
        kvc.StreamingLLM(window=127),
        kvc.StreamingLLM(sinks=4, budget=131),
        kvc.H2O(heavy=512, recent=127),
        kvc.H2O(budget=254),
    ],
)
def test_the_newest_tokens_must_fill_the_residual(first: Method) -> None:
    with pytest.raises(ValueError, match="keeps 127 newest tokens, fewer than the residual of 128"):
        _ = first | kvc.KIVI()


@pytest.mark.parametrize("first", [kvc.SnapKV(budget=64, positions="cache"), kvc.H2O(budget=512, positions="cache")])
def test_packed_keys_are_not_rotated_again(first: Method) -> None:
    with pytest.raises(ValueError, match=r'use positions="original"'):
        _ = first | kvc.KIVI()
