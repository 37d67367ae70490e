"""Zefan-Cai/KVCache-Factory #15: only the first sample of a run was compressed; all later ones kept everything.

The kind: the tenth prompt is compressed like the first, by every way of feeding it, and the bytes show it.
"""

import pytest

import kvcompress as kvc
from kvcompress import Wrapped
from tests.bugs.common import EVICTING, KIVI, SNAPKV, text
from tests.families import tiny

LENGTHS = (50, 50, 31, 64)


def by_generate(wrapped: Wrapped, sample: int) -> int:
    wrapped.generate(text(1, LENGTHS[sample], seed=sample), max_new_tokens=1, do_sample=False)
    return LENGTHS[sample]


def by_the_models_generate(wrapped: Wrapped, sample: int) -> int:
    wrapped.model.generate(text(1, LENGTHS[sample], seed=sample), max_new_tokens=1, do_sample=False)  # pyright: ignore
    return LENGTHS[sample]


def by_prefill(wrapped: Wrapped, sample: int) -> int:
    wrapped.prefill(text(1, LENGTHS[sample], seed=sample), chunk=(None, 7, 20)[sample % 3])
    return LENGTHS[sample]


def by_a_call(wrapped: Wrapped, sample: int) -> int:
    wrapped(text(1, LENGTHS[sample], seed=sample))
    return LENGTHS[sample]


@pytest.mark.parametrize("feed", [by_generate, by_the_models_generate, by_prefill, by_a_call])
@pytest.mark.parametrize("method", [*EVICTING, KIVI, f"{SNAPKV} | {KIVI}"])
def test_every_sample_is_compressed(method: str, feed: object) -> None:
    assert callable(feed)
    with kvc.wrap(tiny("llama"), method) as wrapped:
        for sample in range(len(LENGTHS)):
            tokens = feed(wrapped, sample)
            cache = wrapped.cache
            assert cache.seen.tolist() == [tokens]
            used = cache.nbytes - cache.memory()["spare"]
            for layer in range(2):
                kept = cache.kept(layer)
                assert kept.shape[2] == (tokens if method == KIVI else 12)
                assert kept[0, 0, -1] == tokens - 1
            if method == KIVI:
                assert used < 0.55 * cache.exact_nbytes
            else:
                assert used < (12 / tokens + 0.08) * cache.exact_nbytes
