"""What a prefix cache stores, for whom, within which bytes, and what it refuses."""

from __future__ import annotations

import threading
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import kvcompress as kvc
from kvcompress import CacheError, PrefixCache, WrapError
from kvcompress.prefix.block_kv import BlockKV
from kvcompress.prefix.radix import Entry
from tests.families import VOCABULARY, build, tiny
from tests.prefix.test_reuse import FIRST, METHODS, SECOND, close, random_ids
from tests.tiny import tiny_llama

LAYERS, HEADS, DIM = 2, 2, 16  # of tiny_llama
TOKEN = LAYERS * HEADS * 2 * DIM * 4  # bytes of a token's KV


def entries(store: PrefixCache) -> list[Entry[BlockKV]]:
    found, waiting = [], [store._shared.tree.root]
    while waiting:
        node = waiting.pop()
        found += node.entries
        waiting += node.children.values()
    return found


def storage_bytes(store: PrefixCache) -> int:
    """Bytes of all storages that the stored tensors lie in, each counted once."""
    tensors: list[Tensor] = []
    for entry in entries(store):
        tensors += entry.payload.stacks
        if entry.attached is not None:
            tensors += entry.attached.layers.values()  # pyright: ignore[reportAttributeAccessIssue]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def exact_kv(ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    with kvc.wrap(tiny_llama(), "exact") as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids, cache=cache)
    return [(layer.store.keys[0], layer.store.values[0]) for layer in cache.layers]  # pyright: ignore


def test_no_method_leaves_anything_but_exact_kv() -> None:
    model = tiny_llama()
    store = PrefixCache(model, checkpoint=64)
    for method in METHODS:
        with kvc.wrap(model, method, prefix_cache=store) as wrapped:
            wrapped.prefill(FIRST)
            wrapped.generate(SECOND, max_new_tokens=3, do_sample=False)
            if method != "exact":
                with pytest.raises(CacheError, match="only an exact cache of the same model"):
                    store.insert(SECOND[0], wrapped.cache)
    for ids in (FIRST, SECOND):
        with store.match(ids[0]) as found:
            assert found.tokens == ids.shape[1] // 16 * 16
            for layer, expected in enumerate(exact_kv(ids)):
                for mine, theirs in zip(found.kv(layer), expected, strict=True):
                    assert close(mine, theirs[:, : found.tokens])
    assert store.nbytes == storage_bytes(store)


def test_a_match_is_bitwise_what_was_inserted_and_shared_blocks_are_stored_once() -> None:
    model = tiny_llama()
    store = PrefixCache(model)
    with kvc.wrap(model, "exact") as wrapped:
        caches = []
        for ids in (FIRST, SECOND):
            caches.append(wrapped.new_cache())
            wrapped.prefill(ids, cache=caches[-1])
            store.insert(ids[0], caches[-1])
    # 128 shared tokens, then 40 and 61, of which 32 and 48 are whole blocks.
    assert store.nbytes == (128 + 32 + 48) * TOKEN == storage_bytes(store)
    with store.match(SECOND[0]) as found:
        assert found.tokens == 176
        for layer in range(LAYERS):
            for which, (mine, name) in enumerate(zip(found.kv(layer), ("keys", "values"), strict=True)):
                first, second = (getattr(cache.layers[layer].store, name)[0] for cache in caches)
                assert torch.equal(mine[:, :128], first[:, :128]), (layer, which)
                assert torch.equal(mine[:, 128:], second[:, 128:176]), (layer, which)
    with pytest.raises(ValueError, match="nothing matched"), store.match([1, 2, 3]) as found:
        found.kv(0)


def test_a_turn_that_was_generated_can_be_inserted() -> None:
    model = tiny_llama()
    store = PrefixCache(model)
    with kvc.wrap(model, "exact", prefix_cache=store) as wrapped:
        text = wrapped.generate(FIRST, max_new_tokens=30, do_sample=False)
        assert store.insert(text[0, :-1], wrapped.cache) == 192  # the last token was never fed
        cache = wrapped.new_cache()
        logits = wrapped.prefill(torch.cat([text, SECOND[:, :9]], 1), cache=cache).logits
    assert cache.reused_tokens == [192]
    with torch.no_grad():
        assert close(logits, model(torch.cat([text, SECOND[:, :9]], 1)).logits[:, -1:])


@given(
    capacity=st.integers(0, 400),
    prompts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 160)), min_size=1, max_size=12),
    pinned=st.integers(0, 3),
)
@settings(max_examples=20)
def test_the_cap_holds_beside_what_is_pinned(capacity: int, prompts: list[tuple[int, int]], pinned: int) -> None:
    model = tiny_llama()
    texts = [torch.cat([FIRST[0, :32], random_ids(128, seed=seed)]) for seed in range(4)]
    store = PrefixCache(model, capacity=capacity)
    with kvc.wrap(model, "exact", prefix_cache=store) as wrapped:
        wrapped.prefill(texts[pinned][None])
        assert store.capacity_bytes == capacity // 16 * 16 * TOKEN
        with store.match(texts[pinned]) as found:
            before = [kv.clone() for layer in range(LAYERS) if found.tokens for kv in found.kv(layer)]
            for text, length in prompts:
                wrapped.prefill(texts[text][None, :length])
                assert store.nbytes == storage_bytes(store) <= store.capacity_bytes
                assert store.pinned_bytes == found.tokens * TOKEN
                with store.match(texts[pinned]) as again:
                    assert again.tokens >= found.tokens
            after = [kv for layer in range(LAYERS) if found.tokens for kv in found.kv(layer)]
            assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert store.pinned_bytes == 0
    store.clear()
    assert (store.nbytes, entries(store)) == (0, [])


@pytest.mark.parametrize(("missing", "tokens"), [(0, 176), (1, 160)])
def test_a_capacity_in_bytes_counts_column_sums(missing: int, tokens: int) -> None:
    sums = LAYERS * HEADS * 4 * (64 + 128)
    store = PrefixCache(tiny_llama(), f"{176 * TOKEN + sums - missing}B", checkpoint=64)
    with kvc.wrap(tiny_llama(), "h2o(heavy=24, recent=24)", prefix_cache=store) as wrapped:
        wrapped.prefill(SECOND)
    assert store.nbytes == storage_bytes(store) == tokens * TOKEN + sums


def variants() -> dict[str, PrefixCache]:
    """Prefix caches that must never serve each other's prompts."""
    model = tiny_llama()
    changed = deepcopy(model)
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[3] += 0.1
    turned = deepcopy(model)
    turned.model.rotary_emb.inv_freq *= 1.01
    other = deepcopy(model.config)
    other.rope_parameters["rope_theta"] = 5000.0
    renamed = AutoModelForCausalLM.from_config(other)
    renamed.load_state_dict(model.state_dict())
    store = PrefixCache(model)
    return {
        "plain": store,
        "tenant": store.tenant(b"b"),
        "salt": PrefixCache(model, salt=b"a"),
        "weights": PrefixCache(changed),
        "dtype": PrefixCache(deepcopy(model).bfloat16()),
        "frequencies": PrefixCache(turned),
        "rope_theta": PrefixCache(renamed),
    }


def test_no_other_weights_dtype_rotary_or_tenant_has_the_same_keys() -> None:
    keys = {name: tuple(store.keys(FIRST[0].tolist())) for name, store in variants().items()}
    keys["chunked"] = tuple(PrefixCache(tiny_llama()).keys(FIRST[0].tolist(), chunk=32))
    assert all(len(each) == 10 for each in keys.values())
    assert len({key for each in keys.values() for key in each}) == 10 * len(keys)
    assert keys["plain"] == tuple(PrefixCache(deepcopy(tiny_llama())).keys(FIRST[0].tolist()))


def test_tenants_share_the_memory_but_never_a_prompt() -> None:
    model = tiny_llama()
    ours = PrefixCache(model, capacity=320)
    theirs = ours.tenant(b"them")
    with kvc.wrap(model, "exact", prefix_cache=ours) as wrapped:
        wrapped.prefill(FIRST)
    with theirs.match(FIRST[0]) as found:
        assert found.tokens == 0
    with kvc.wrap(model, "exact", prefix_cache=theirs) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(FIRST, cache=cache)
    assert cache.reused_tokens == [0]
    assert ours.nbytes == theirs.nbytes == 320 * TOKEN
    with ours.match(FIRST[0]) as mine, theirs.match(FIRST[0]) as found:
        assert (mine.tokens, found.tokens) == (160, 160)


def test_eight_threads_lose_nothing_and_tear_nothing() -> None:
    model = tiny_llama()
    texts = [torch.cat([FIRST[0, : 32 * (1 + seed % 3)], random_ids(90, seed=seed)])[None] for seed in range(12)]
    with kvc.wrap(model, "exact") as wrapped:
        expected = [wrapped.prefill(ids).logits for ids in texts]
    kv = [exact_kv(ids) for ids in texts]
    store = PrefixCache(model, capacity=480)
    failures: list[Any] = []
    over: list[int] = []

    def work(wrapped: kvc.Wrapped, thread: int) -> None:
        try:
            for turn in range(12):
                which = (5 * thread + 7 * turn) % len(texts)
                if not close(wrapped.prefill(texts[which]).logits, expected[which]):
                    failures.append((thread, turn))
                with store.match(texts[which][0]) as found:
                    for layer in range(LAYERS if found.tokens else 0):
                        for mine, theirs in zip(found.kv(layer), kv[which][layer], strict=True):
                            if not close(mine, theirs[:, : found.tokens]):
                                failures.append((thread, turn, layer))
                over.append(max(0, store.nbytes - store.capacity_bytes))
        except Exception as error:
            failures.append(error)

    with kvc.wrap(model, "exact", prefix_cache=store) as wrapped:
        threads = [threading.Thread(target=work, args=(wrapped, thread), daemon=True) for thread in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    assert not failures and not any(over)
    assert (store.counts.prompts, store.counts.tokens) == (96, sum(t.shape[1] for t in texts) * 8)
    assert store.counts.reused > 0 and store.evicted_blocks > 0
    assert (store.pinned_bytes, store.nbytes) == (0, storage_bytes(store))


def test_a_match_ends_at_the_first_differing_block() -> None:
    model = tiny_llama()
    store = PrefixCache(model)
    with kvc.wrap(model, "exact", prefix_cache=store) as wrapped:
        wrapped.prefill(FIRST)
    for place in (0, 15, 16, 100, 159, 160):
        ids = FIRST[0].clone()
        ids[place] = (ids[place] + 1) % 256
        with store.match(ids, reserve=0) as found:
            assert found.tokens == min(160, place // 16 * 16)


@pytest.mark.parametrize("reserve", [0, 1, 8, 9, 168, 500])
def test_the_reserved_end_is_never_matched(reserve: int) -> None:
    model = tiny_llama()
    store = PrefixCache(model)
    with kvc.wrap(model, "exact", prefix_cache=store) as wrapped:
        wrapped.prefill(FIRST)
    with store.match(FIRST[0], reserve) as found:
        assert found.tokens == max(0, 168 - reserve) // 16 * 16


def test_sliding_layers_are_stored_in_time_or_not_at_all() -> None:
    model = tiny("gemma2")
    ids = random_ids(1, 70, vocabulary=VOCABULARY)
    store = PrefixCache(model)
    with kvc.wrap(model, "exact") as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids, cache=cache)
        with pytest.raises(CacheError, match="layer 0 slides and has dropped its oldest KV"):
            store.insert(ids[0], cache)
    with kvc.wrap(model, "exact", prefix_cache=store) as wrapped:
        wrapped.prefill(ids)
    with store.match(ids[0]) as found:
        assert [found.kv(layer)[0].shape[1] for layer in range(4)] == [64] * 4


def test_a_model_whose_kv_depends_on_the_prompts_length_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    model = build("llama", vocab_size=61, hidden_size=32, num_hidden_layers=1, rope_parameters=rope)
    with pytest.raises(CacheError, match=r"depend on the length of the whole prompt \(rope type 'dynamic'\)"):
        PrefixCache(model)


def test_linear_attention_is_refused() -> None:
    config = AutoConfig.for_model("mamba", vocab_size=61, hidden_size=32, num_hidden_layers=1, state_size=4)
    with pytest.raises(WrapError):
        PrefixCache(AutoModelForCausalLM.from_config(config))


def test_another_models_prefix_cache_is_refused() -> None:
    with pytest.raises(CacheError, match="made for another model"):
        kvc.wrap(tiny_llama(), "exact", prefix_cache=PrefixCache(tiny("llama")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 0}, "a block holds at least 1 token"),
        ({"checkpoint": 100}, "checkpoint=100: expected tokens, a multiple of block=16"),
        ({"capacity": "2 apples"}, "2 apples"),
        ({"capacity": -1}, r"capacity=-1: expected bytes \(\"2GiB\"\) or a number of tokens"),
        ({"salt": "text"}, "salt='text': expected bytes"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        PrefixCache(tiny_llama(), **options)


def test_only_one_prompt_is_matched_or_inserted_at_a_time() -> None:
    model = tiny_llama()
    store = PrefixCache(model)
    with pytest.raises(ValueError, match=r"ids of shape \(1, 168\): expected one prompt"):
        store.match(FIRST)
    with kvc.wrap(model, "exact") as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(FIRST, cache=cache)
    with pytest.raises(CacheError, match=r"row 0 holds no 189 tokens: the cache has seen \[168\]"):
        store.insert(SECOND[0], cache)
