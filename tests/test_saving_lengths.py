"""What is saved comes back: at every length, for every method and composition, whatever was done to the rows before."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvcompress as kvc
from tests.families import VOCABULARY, tiny
from tests.turns import METHODS as WITH_TURNS
from tests.turns import Script, scripts

MODEL = tiny("llama")
RESIDUAL = 4
KIVI = f"kivi(bits=2, group_size=4, residual={RESIDUAL})"
METHODS = [
    "exact",
    "streaming_llm(sinks=2, window=5)",
    "h2o(heavy=0.3, recent=0.3)",
    "snapkv(budget=5, window=3)",
    KIVI,
    "kivi(bits=4, group_size=2, residual=4)",
    f"streaming_llm(sinks=2, window=4) | {KIVI}",
    f"h2o(heavy=3, recent=4) | {KIVI}",
    f"snapkv(budget=8, window=3) | {KIVI}",
]


def assert_it_comes_back(wrapped: kvc.Wrapped, cache: kvc.CompressedCache, path: Path) -> None:
    """Saves and loads `cache` and goes on from both, by one token and by several."""
    cache.save(path)
    loaded = kvc.load_cache(path, MODEL)
    assert torch.equal(loaded.seen, cache.seen)
    parts = [part.buffer for layer in cache.layers for part in layer.store.columns().values()]
    apart = cache.rows == 1 or all(part.stride(0) for part in parts)  # rows of a fork may be the same memory
    if apart and not cache.memory()["shared"]:
        assert loaded.memory() | {"spare": 0} == cache.memory() | {"spare": 0}
    generator = torch.Generator().manual_seed(1)
    for columns in (1, RESIDUAL + 1):
        ids = torch.randint(3, VOCABULARY, (cache.rows, columns), generator=generator)
        found, expected = wrapped(ids, cache=loaded).logits, wrapped(ids, cache=cache).logits
        if apart:
            assert torch.equal(found, expected)
        else:  # rows that are the same memory are multiplied in another order, which rounds the last bit otherwise
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for layer in range(len(cache.layers)):
            assert torch.equal(loaded.kept(layer), cache.kept(layer))


def prompt(columns: int, padding: list[int]) -> tuple[Tensor, Tensor]:
    """Ids of `columns` columns and the mask; every row keeps a token."""
    ids = torch.randint(3, VOCABULARY, (len(padding), columns), generator=torch.Generator().manual_seed(columns))
    mask = (torch.arange(columns) >= torch.tensor([min(each, columns - 1) for each in padding])[:, None]).long()
    return ids, mask


@pytest.mark.parametrize("method", METHODS)
def test_at_every_length(method: str, tmp_path: Path) -> None:
    """Up to three residuals, by one prompt and then by decoding; the second row's padding leaves another residual."""
    with kvc.wrap(MODEL, method) as wrapped:
        decoded = wrapped.new_cache()
        for columns in range(1, 3 * RESIDUAL + 1):
            ids, mask = prompt(columns, [0, 3])
            cache = wrapped.new_cache()
            wrapped.prefill(ids, mask, cache)
            wrapped(ids[:, -1:], cache=decoded)
            for each in (cache, decoded.fork()):
                assert_it_comes_back(wrapped, each, tmp_path / "cache")


@pytest.mark.parametrize("method", WITH_TURNS)
@given(script=scripts(longest=40), rows=st.lists(st.integers(0, 2), min_size=1, max_size=4), copies=st.integers(1, 2))
@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_after_turns_and_whatever_is_done_to_the_rows(
    method: str, script: Script, rows: list[int], copies: int, tmp_path: Path
) -> None:
    """Rows are dropped, repeated and put in another order, so that what stays may need less than what is held."""
    with kvc.wrap(MODEL, method) as wrapped:
        cache = wrapped.new_cache()
        script.play(wrapped, cache)
        cache = cache.fork(copies)
        cache.reorder_cache(torch.tensor([row % cache.rows for row in rows]))
        assert_it_comes_back(wrapped, cache, tmp_path / "cache")
