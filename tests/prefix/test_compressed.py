"""Compressed prefixes: kept beside the exact blocks, under keys of their own."""

import pytest
import torch

import kvcompress as kvc
from kvcompress import CacheError, PrefixCache
from kvcompress.prefix.compressed import CompressedPrefix
from tests.prefix.test_prefix_cache import TOKEN, entries, exact_kv
from tests.prefix.test_reuse import FIRST, NEXT, PREFIX, close, random_ids
from tests.reachable import reachable_bytes
from tests.tiny import tiny_llama

LOSSY = [
    "streaming_llm(sinks=4, window=44)",
    "h2o(heavy=24, recent=24)",
    "kivi(bits=2, group_size=8, residual=16)",
    "h2o(heavy=24, recent=24) | kivi(bits=4, group_size=8, residual=16)",
]


@pytest.mark.parametrize("method", LOSSY)
def test_a_kept_prefix_decodes_as_the_prefill_that_made_it(method: str) -> None:
    store = PrefixCache(tiny_llama())
    with kvc.wrap(tiny_llama(), method) as wrapped:
        made = wrapped.new_cache()
        wrapped.prefill(PREFIX[None], cache=made)
        assert store.compressed(PREFIX, method) is None
        assert store.insert_compressed(PREFIX, made)
        stored = store.nbytes
        expected = wrapped(NEXT, cache=made).logits
        for _ in range(2):  # what one user feeds, the next does not see
            cache = store.compressed(PREFIX, method)
            assert cache is not None and cache.seen.tolist() == [128]
            assert torch.equal(wrapped(NEXT, cache=cache).logits, expected)
        assert store.nbytes == stored
        kept = store.compressed(PREFIX, method)
        assert kept is not None and stored == kept.nbytes == reachable_bytes(kept, not_from=kept.rotaries)
    assert (store.counts.prompts, store.counts.reused) == (3, 3 * 128)


def test_it_matches_no_other_method_prompt_tenant_or_exact_prefill() -> None:
    model, method = tiny_llama(), LOSSY[0]
    store = PrefixCache(model)
    with kvc.wrap(model, method) as wrapped:
        made = wrapped.new_cache()
        wrapped.prefill(PREFIX[None], cache=made)
    store.insert_compressed(PREFIX, made)
    assert store.compressed(PREFIX, "streaming_llm(sinks=4, window=45)") is None
    assert store.compressed(PREFIX[:-1], method) is None
    assert store.compressed(FIRST[0], method) is None
    assert store.tenant(b"other").compressed(PREFIX, method) is None
    assert store.match(PREFIX, reserve=0).tokens == 0
    with kvc.wrap(model, method, prefix_cache=store) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(FIRST, cache=cache)
        assert cache.reused_tokens == [0]
    with store.match(PREFIX, reserve=0) as match:
        assert match.tokens == 128
        for layer, (keys, values) in enumerate(exact_kv(FIRST)):
            found = match.kv(layer)
            assert close(found[0], keys[:, :128]) and close(found[1], values[:, :128])


def test_it_shares_the_cap_and_the_oldest_goes() -> None:
    model, method = tiny_llama(), LOSSY[0]
    prompts = [random_ids(128, seed=seed) for seed in range(4)]
    with kvc.wrap(model, method) as wrapped:
        caches = [wrapped.new_cache() for _ in prompts]
        for ids, cache in zip(prompts, caches, strict=True):
            wrapped.prefill(ids[None], cache=cache)
    size = caches[0].nbytes
    store = PrefixCache(model, capacity=f"{2 * size}B")
    for ids, cache in zip(prompts, caches, strict=True):
        assert store.insert_compressed(ids, cache)
        assert store.nbytes == sum(entry.nbytes for entry in entries(store)) <= 2 * size
    assert [store.compressed(ids, method) is not None for ids in prompts] == [False, False, True, True]
    assert not PrefixCache(model, capacity=f"{size - 1}B").insert_compressed(prompts[0], caches[0])


def test_what_depends_on_the_suffix_or_is_exact_is_refused() -> None:
    store = PrefixCache(tiny_llama())
    for method, reason in (
        ("snapkv(budget=48, window=8)", "chooses by the end of the whole prompt"),
        ("snapkv(budget=48, window=8) | kivi(bits=4, group_size=8, residual=16)", "chooses by the end"),
        ("exact", "use insert"),
    ):
        with kvc.wrap(tiny_llama(), method) as wrapped:
            cache = wrapped.new_cache()
            wrapped.prefill(PREFIX[None], cache=cache)
        with pytest.raises(CacheError, match=reason):
            store.insert_compressed(PREFIX, cache)
    with kvc.wrap(tiny_llama(), LOSSY[0]) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(PREFIX[None], cache=cache)
        wrapped(NEXT, cache=cache)
    with pytest.raises(CacheError, match=r"these 128 tokens and nothing else; this one has seen \[134\]"):
        store.insert_compressed(PREFIX, cache)
    assert store.nbytes == 0


def test_only_what_one_prefill_left_is_taken() -> None:
    """The same tokens in two calls, in chunks, or with more of the prompt to come leave another cache."""
    model, method = tiny_llama(), "streaming_llm(budget=0.5)"
    store, ids = PrefixCache(model), PREFIX[None]
    with kvc.wrap(model, method) as wrapped:
        two_calls, in_chunks, unfinished = wrapped.new_cache(), wrapped.new_cache(), wrapped.new_cache()
        wrapped.prefill(ids[:, :64], cache=two_calls)
        wrapped(ids[:, 64:], cache=two_calls)
        wrapped.prefill(ids, cache=in_chunks, chunk=64)
        with unfinished.prefilling([256], 256):
            wrapped(ids, cache=unfinished)
        for cache in (two_calls, in_chunks, unfinished):
            with pytest.raises(CacheError, match="that one prefill, in one piece, has fed"):
                store.insert_compressed(PREFIX, cache)
    exact = PrefixCache(model)
    with kvc.wrap(model, method, prefix_cache=exact) as wrapped:
        wrapped.prefill(ids[:, :64])
        reused = wrapped.new_cache()
        wrapped.prefill(ids, cache=reused)
        assert reused.reused_tokens == [64]
        assert exact.insert_compressed(PREFIX, reused)
        found = exact.compressed(PREFIX, method)
        assert found is not None and found.kept(0).shape[-1] == 64


def test_it_competes_with_exact_blocks_for_a_capacity_in_tokens() -> None:
    model, method = tiny_llama(), LOSSY[0]
    with kvc.wrap(model, method) as wrapped:
        made, short = wrapped.new_cache(), wrapped.new_cache()
        wrapped.prefill(PREFIX[None], cache=made)
        wrapped.prefill(PREFIX[None, :64], cache=short)
    store = PrefixCache(model, capacity=160)
    assert store.insert_compressed(PREFIX, made)
    assert store.capacity_bytes == 160 * TOKEN
    with kvc.wrap(model, method, prefix_cache=store) as wrapped:
        in_use = store.compressed(PREFIX, method)
        assert in_use is not None
        wrapped.prefill(FIRST[:, :144])  # takes the room of what is in use, which lives on as the user's own
        assert store.nbytes == 144 * TOKEN and store.compressed(PREFIX, method) is None
        assert torch.equal(wrapped(NEXT, cache=in_use).logits, wrapped(NEXT, cache=made).logits)
        assert store.insert_compressed(PREFIX[:64], short)
        with store.match(FIRST[0]) as match:
            assert match.tokens * TOKEN + made_bytes(store) == store.nbytes <= store.capacity_bytes


def made_bytes(store: PrefixCache) -> int:
    """Bytes of the compressed prompts alone."""
    return sum(entry.nbytes for entry in entries(store) if isinstance(entry.payload, CompressedPrefix))


def test_a_cache_of_another_dtype_is_refused() -> None:
    with kvc.wrap(tiny_llama(), LOSSY[0]) as wrapped, torch.autocast("cpu", torch.bfloat16):
        cache = wrapped.new_cache()
        wrapped.prefill(PREFIX[None], cache=cache)
    with pytest.raises(CacheError, match=r"holds torch\.bfloat16 on cpu, but the model is torch\.float32"):
        PrefixCache(tiny_llama()).insert_compressed(PREFIX, cache)
