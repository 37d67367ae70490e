"""The arithmetic of `stored_bytes` and `most_bytes` against the bytes that real caches hold, method by method."""

import pytest
import torch

import kvcompress as kvc
from kvcompress.budget import method_bytes
from kvcompress.cache_layer import shapes_of
from tests.families import VOCABULARY, tiny

PACKED = "kivi(bits=2, group_size=8, residual=16)"
METHODS = [
    "exact",
    "streaming_llm(sinks=2, window=20)",
    "streaming_llm(sinks=2, window=20, positions='original')",
    "h2o(heavy=11, recent=9)",
    "h2o(budget=0.5, positions='cache')",
    "snapkv(budget=24, window=8)",
    "snapkv(budget=0.4, window=8)",
    PACKED,
    "kivi(bits=4, group_size=16, residual=32)",
    f"snapkv(budget=37, window=8) | {PACKED}",
    f"h2o(heavy=20, recent=17) | {PACKED}",
    f"streaming_llm(sinks=3, window=16) | {PACKED}",
    f"streaming_llm(sinks=3, window=40) | {PACKED}",
    "streaming_llm(sinks=3, window=32) | kivi(bits=4, group_size=32, residual=32)",
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_arithmetic_equals_what_a_cache_holds(family: str, method: str) -> None:
    for length in (1, 7, 16, 18, 19, 35, 64, 100):
        ids = torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(length))
        mask = torch.ones_like(ids)
        mask[1, : min(13, length - 1)] = 0  # another residual, and less of everything
        with kvc.wrap(tiny(family), method) as wrapped:
            for padding in (None, mask):
                wrapped.prefill(ids, padding)
                cache = wrapped.cache
                full = next(layer.index for layer in cache.layers if layer.compresses)
                kept = (cache.kept(full) >= 0).sum(-1)[:, 0].tolist()
                measured = cache.nbytes - cache.memory()["spare"]
                expected = method_bytes(cache.method, shapes_of(cache.layers), kept, cache.seen.tolist())
                assert measured == expected, (length, kept)


def test_exact_bytes_are_those_of_an_exact_cache() -> None:
    ids = torch.randint(3, VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(0))
    for family in ("llama", "gemma3_text"):
        with kvc.wrap(tiny(family), "exact") as wrapped:
            wrapped.prefill(ids)
            exact = wrapped.cache
        with kvc.wrap(tiny(family), f"h2o(heavy=4, recent=16) | {PACKED}") as wrapped:
            wrapped.prefill(ids)
            assert wrapped.cache.exact_nbytes == exact.exact_nbytes
        held = exact.memory()
        assert held["keys"] + held["values"] == exact.exact_nbytes
