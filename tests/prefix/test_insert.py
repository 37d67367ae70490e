"""A prefix cache takes a cache's KV under the ids that it was fed, and under no others."""

from __future__ import annotations

import pytest
import torch

import kvcompress as kvc
from kvcompress import CacheError, CompressedCache, PrefixCache
from tests.prefix.test_padded import padded
from tests.prefix.test_prefix_cache import exact_kv
from tests.prefix.test_reuse import FIRST, SECOND, close
from tests.tiny import tiny_llama

ROWS = [FIRST[0, :90], SECOND[0, 100:150]]


def batch(chunk: int | None = None) -> CompressedCache:
    """An exact cache after a padded prompt of two rows, a step, and a further prompt."""
    ids, mask = padded([row[:-12] for row in ROWS])
    with kvc.wrap(tiny_llama(), "exact") as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids, mask, cache, chunk)
        wrapped(torch.stack([row[-12:-11] for row in ROWS]), cache=cache)
        wrapped.prefill(torch.stack([row[-11:] for row in ROWS]), cache=cache)
    return cache


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("row", [0, 1])
def test_other_ids_are_refused_wherever_they_differ(row: int, chunk: int | None) -> None:
    store, cache, right = PrefixCache(tiny_llama()), batch(chunk), ROWS[row]
    for each in (cache, cache.fork()):
        for place in (0, 1, len(right) // 2, len(right) - 12, len(right) - 1):
            ids = right.clone()
            ids[place] = (ids[place] + 1) % 256
            told = f"row {row} of this cache was fed id {right[place]} at position {place}, .* have {ids[place]} there"
            with pytest.raises(CacheError, match=told):
                store.insert(ids, each, row)
        with pytest.raises(CacheError, match=f"row {row} of this cache was fed id"):
            store.insert(ROWS[1 - row][: len(right)][:50], each, row)
    assert store.nbytes == 0


@pytest.mark.parametrize("length", [1, 16, 40, 50])
def test_the_first_ids_of_what_was_fed_are_stored(length: int) -> None:
    store, cache = PrefixCache(tiny_llama()), batch()
    for row, ids in enumerate(ROWS):
        assert store.insert(ids[:length].tolist(), cache, row) == length // 16 * 16
        with store.match(ids, reserve=0) as found:
            assert found.tokens == length // 16 * 16
            for layer, expected in enumerate(exact_kv(ids[None]) if found.tokens else []):
                for mine, theirs in zip(found.kv(layer), expected, strict=True):
                    assert close(mine, theirs[:, : found.tokens])


def test_rows_that_changed_places_are_stored_under_their_own_ids() -> None:
    store, cache = PrefixCache(tiny_llama()), batch()
    cache.reorder_cache(torch.tensor([1, 0]))
    with pytest.raises(CacheError, match="row 0 of this cache was fed id"):
        store.insert(ROWS[0][:50], cache, row=0)
    assert store.insert(ROWS[0], cache, row=1) == 80


def test_a_compressed_prompt_is_kept_under_its_own_ids_alone() -> None:
    model, method = tiny_llama(), "h2o(heavy=24, recent=24)"
    store = PrefixCache(model)
    with kvc.wrap(model, method) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(FIRST, cache=cache)
    other = FIRST[0].clone()
    other[100] = (other[100] + 1) % 256
    with pytest.raises(CacheError, match=r"row 0 of this cache was fed id .* at position 100"):
        store.insert_compressed(other, cache)
    assert store.compressed(other, method) is None and store.insert_compressed(FIRST[0], cache)


def test_embeddings_have_no_ids() -> None:
    model = tiny_llama()
    store = PrefixCache(model)
    with kvc.wrap(model, "exact") as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(FIRST[:, :40], cache=cache)
        with torch.no_grad():
            embeds = model.get_input_embeddings()(FIRST[:, 40:60])
            model(inputs_embeds=embeds, **{wrapped.cache_name: cache})
    with pytest.raises(CacheError, match=r"only the first 40 ids are known, but 60 were given: .* inputs_embeds"):
        store.insert(FIRST[0, :60], cache)
    assert store.insert(FIRST[0, :40], cache) == 32
