"""Prefills over a prefix cache against the same ones without it."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

import kvcompress as kvc
from kvcompress import CacheError, CompressedCache, PrefixCache, Wrapped
from kvcompress.compat import cache_argument
from kvcompress.measure.quality import evaluate
from tests.families import FAMILIES, VOCABULARY, tiny
from tests.tiny import tiny_llama

CHECKPOINT = 64
METHODS = [
    "exact",
    "streaming_llm(sinks=4, window=44)",
    'streaming_llm(sinks=4, window=44, positions="original")',
    "h2o(heavy=24, recent=24)",
    "snapkv(budget=0.3, window=8)",
    'snapkv(budget=48, window=8, positions="cache")',
    "kivi(bits=2, group_size=8, residual=16)",
    "snapkv(budget=48, window=8) | kivi(bits=4, group_size=8, residual=16)",
    'snapkv(budget="30KiB", window=8)',
    "h2o(heavy=24, recent=24) | kivi(bits=4, group_size=8, residual=16)",
]


def random_ids(*shape: int, seed: int = 0, vocabulary: int = 256) -> Tensor:
    return torch.randint(1, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


PREFIX = random_ids(128)
FIRST = torch.cat([PREFIX, random_ids(40, seed=1)])[None]
SECOND = torch.cat([PREFIX, random_ids(61, seed=2)])[None]
NEXT = random_ids(1, 6, seed=3)


def run(wrapped: Wrapped, ids: Tensor, cache: CompressedCache | None = None) -> tuple[CompressedCache, Tensor]:
    """The cache after prefill, and the logits of the prompt's last token and of `NEXT` fed after it, one by one."""
    cache = wrapped.new_cache() if cache is None else cache
    logits = [wrapped.prefill(ids, cache=cache).logits]
    kept = cache.fork()
    rows = NEXT.expand(len(ids), -1)
    logits += [wrapped(rows[:, [column]], cache=cache).logits for column in range(rows.shape[1])]
    return kept, torch.cat(logits, 1)


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-4 * expected.abs().max())


def same_kept(first: CompressedCache, second: CompressedCache) -> bool:
    return all(torch.equal(first.kept(layer), second.kept(layer)) for layer in range(len(first.layers)))


@pytest.mark.parametrize("method", METHODS)
def test_a_reused_prefix_changes_nothing(method: str) -> None:
    model = tiny_llama()
    with kvc.wrap(model, method) as wrapped:
        plain, expected = run(wrapped, SECOND)
    store = PrefixCache(model, checkpoint=CHECKPOINT)
    with kvc.wrap(model, method, prefix_cache=store) as wrapped:
        first, _ = run(wrapped, FIRST)
        cache, logits = run(wrapped, SECOND)
    del wrapped  # which holds the last cache used, and would share its memory
    assert (first.reused_tokens, cache.reused_tokens) == ([0], [128])
    assert close(logits, expected)
    assert same_kept(cache, plain)
    assert {name: size for name, size in cache.memory().items() if name != "spare"} == {
        name: size for name, size in plain.memory().items() if name != "spare"
    }
    assert cache.seen.tolist() == [189]


@pytest.mark.parametrize("method", METHODS)
def test_reuse_is_bitwise_the_same_chunked_prefill(method: str) -> None:
    model, parsed = tiny_llama(), kvc.parse(method)
    with kvc.wrap(model, "exact") as wrapped:
        gathered = wrapped.new_cache(gather_for=[parsed])
        wrapped.prefill(SECOND, cache=gathered, chunk=128)
        rotaries = wrapped.rotaries() if parsed.position_mode == "cache" else None
        expected = gathered.compress_as(parsed, rotaries)
    store = PrefixCache(model, checkpoint=128)
    with kvc.wrap(model, method, prefix_cache=store) as wrapped:
        wrapped.prefill(SECOND[:, :128])
        cache = wrapped.new_cache()
        wrapped.prefill(SECOND, cache=cache)
        assert cache.reused_tokens == [128]
        assert torch.equal(wrapped(NEXT, cache=cache).logits, wrapped(NEXT, cache=expected).logits)
    for mine, theirs in zip(cache.layers, expected.layers, strict=True):
        assert mine.store.state() == theirs.store.state()
        for name, tensor in theirs.store.tensors().items():
            assert torch.equal(mine.store.tensors()[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_continues_from_stored_kv(family: str) -> None:
    model = tiny(family)
    prefix, chunk = random_ids(1, 48, vocabulary=VOCABULARY), 48
    ids = torch.cat([prefix, random_ids(1, 30, seed=5, vocabulary=VOCABULARY)], 1)
    with kvc.wrap(model, "exact") as wrapped:
        chunked, one_shot = wrapped.new_cache(), wrapped.new_cache()
        expected = wrapped.prefill(ids, cache=chunked, chunk=chunk).logits
        whole = wrapped.prefill(ids, cache=one_shot).logits
    store = PrefixCache(model)
    with kvc.wrap(model, "exact", prefix_cache=store) as wrapped:
        wrapped.prefill(prefix)
        cache = wrapped.new_cache()
        logits = wrapped.prefill(ids, cache=cache).logits
    assert cache.reused_tokens == [48]
    assert torch.equal(logits, expected) and close(logits, whole)
    for mine, theirs in zip(cache.layers, chunked.layers, strict=True):
        assert torch.equal(mine.store.keys, theirs.store.keys) and torch.equal(mine.store.values, theirs.store.values)
    assert same_kept(cache, one_shot)


@given(lengths=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 90)), min_size=2, max_size=6))
@settings(max_examples=12)
def test_chunked_prefills_are_bitwise_the_same_whatever_was_stored_before(lengths: list[tuple[int, int]]) -> None:
    """Whole chunks alone are stored and matched, so the same calls computed each of them."""
    model, texts = tiny_llama(), [torch.cat([PREFIX[:50], random_ids(1, 60, seed=seed)[0]])[None] for seed in (1, 2, 3)]
    prompts = [texts[text][:, :length] for text, length in lengths]
    with kvc.wrap(model, "exact") as wrapped:
        expected = [wrapped.prefill(ids, chunk=32).logits for ids in prompts]
    store = PrefixCache(model, capacity=128)
    with kvc.wrap(model, "exact", prefix_cache=store) as wrapped:
        for ids, logits in zip(prompts, expected, strict=True):
            wrapped.prefill(ids)  # its own blocks must never be taken for those of a chunked prefill
            assert torch.equal(wrapped.prefill(ids, chunk=32).logits, logits)


def test_only_whole_chunks_are_stored_and_matched() -> None:
    store = PrefixCache(tiny_llama())
    with kvc.wrap(tiny_llama(), "exact", prefix_cache=store) as wrapped:
        for length, reused, stored in ((90, 0, 64), (64, 32, 64), (96, 64, 96), (90, 64, 96)):
            cache = wrapped.new_cache()
            wrapped.prefill(FIRST[:, :length], cache=cache, chunk=32)
            token = 2 * 2 * 2 * 16 * 4  # bytes: keys and values of 2 layers and 2 KV heads of 16 dims in fp32
            assert (cache.reused_tokens, store.nbytes) == ([reused], stored * token)


def test_restarted_positions_would_be_noticed() -> None:
    """The control: the suffix fed after the same KV, but at positions from 0 on, gives clearly other logits."""
    model = tiny_llama()
    with kvc.wrap(model, "exact", prefix_cache=PrefixCache(model)) as wrapped:
        wrapped.prefill(FIRST)
        reused = wrapped.prefill(SECOND).logits
    logits, name = {}, cache_argument(model.forward)
    with torch.no_grad():
        for start in (0, 128):
            cache = DynamicCache(config=model.config)
            model(PREFIX[None], **{name: cache})
            positions = torch.arange(start, start + 61)[None]
            logits[start] = model(SECOND[:, 128:], position_ids=positions, **{name: cache}).logits[:, -1:]
    assert close(reused, logits[128])
    assert (reused - logits[0]).abs().max() > 0.05 * reused.abs().max()


def test_h2o_begins_at_a_checkpoint_and_keeps_its_scores() -> None:
    model, method = tiny_llama(), "h2o(heavy=24, recent=24)"
    with kvc.wrap(model, method) as wrapped:
        plain, _ = run(wrapped, SECOND)
    store = PrefixCache(model, checkpoint=48)
    with kvc.wrap(model, "exact", prefix_cache=store) as wrapped:
        wrapped.prefill(FIRST)
    without_sums = store.nbytes
    with kvc.wrap(model, method, prefix_cache=store) as wrapped:
        first, _ = run(wrapped, FIRST)
        # Of 2 layers with 2 KV heads, sums of 48, 96 and 144 tokens in fp32.
        assert store.nbytes == without_sums + 2 * 2 * 4 * (48 + 96 + 144)
        cache, _ = run(wrapped, SECOND)
    assert (first.reused_tokens, cache.reused_tokens) == ([0], [96])
    assert same_kept(cache, plain)
    for mine, theirs in zip(cache.layers, plain.layers, strict=True):
        assert mine.store.scores is not None and theirs.store.scores is not None
        torch.testing.assert_close(mine.store.scores.view, theirs.store.scores.view, rtol=1e-5, atol=1e-5)


def test_the_observation_window_is_computed_again() -> None:
    model = tiny_llama()
    ids = SECOND[:, :144]
    with kvc.wrap(model, "snapkv(budget=64, window=32)", prefix_cache=PrefixCache(model)) as wrapped:
        for expected in (0, 112):
            cache = wrapped.new_cache()
            wrapped.prefill(ids, cache=cache)
            assert cache.reused_tokens == [expected]
    with kvc.wrap(model, "exact", prefix_cache=PrefixCache(model)) as wrapped:
        for expected in (0, 128):
            cache = wrapped.new_cache()
            wrapped.prefill(ids, cache=cache)
            assert cache.reused_tokens == [expected]


@pytest.mark.parametrize("method", ["exact", "h2o(heavy=24, recent=24)", "snapkv(budget=48, window=8)"])
def test_rows_of_a_batch_begin_each_with_what_is_stored_of_it(method: str) -> None:
    model = tiny_llama()
    batch = torch.cat([SECOND[:, :160], torch.cat([PREFIX[:64], random_ids(96, seed=7)])[None]])
    with kvc.wrap(model, method) as wrapped:
        plain, expected = run(wrapped, batch)
    store = PrefixCache(model, checkpoint=32)
    with kvc.wrap(model, method, prefix_cache=store) as wrapped:
        wrapped.prefill(FIRST)
        cache, logits = run(wrapped, batch)
        again, _ = run(wrapped, batch)
    assert (cache.reused_tokens, again.reused_tokens) == ([128, 64], 2 * [128 if method[0] == "h" else 144])
    assert close(logits, expected) and same_kept(cache, plain)


def test_filled_and_chunk_evicting_prompts_run_by_themselves() -> None:
    model = tiny_llama()
    store = PrefixCache(model)
    ids = random_ids(2, 60, seed=9)
    with kvc.wrap(model, "kivi(group_size=8, residual=16)", prefix_cache=store) as wrapped:
        wrapped.prefill(ids, chunk=32)
        assert store.nbytes == 0
        cache = wrapped.new_cache()
        wrapped.prefill(ids, cache=cache)
        stored = store.nbytes
        wrapped.prefill(ids, cache=cache)
    assert store.nbytes == stored > 0
    assert store.counts.prompts == 2


@pytest.mark.parametrize("method", ["exact", "h2o(heavy=24, recent=24)", "kivi(bits=4, group_size=8, residual=16)"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generate_reuses_and_stores(method: str, options: dict[str, int]) -> None:
    model = tiny_llama()
    with kvc.wrap(model, method) as wrapped:
        expected = wrapped.generate(SECOND, max_new_tokens=8, do_sample=False, **options)
    store = PrefixCache(model, checkpoint=CHECKPOINT)
    with kvc.wrap(model, method, prefix_cache=store) as wrapped:
        wrapped.generate(FIRST, max_new_tokens=2, do_sample=False)
        assert torch.equal(model.generate(SECOND, max_new_tokens=8, do_sample=False, **options), expected)
        assert set(wrapped.cache.reused_tokens) == {128}
        # Tokens, and no embeddings of which nobody knows the tokens, name what is stored.
        embeds = model.get_input_embeddings()(SECOND)
        wrapped.model.generate(inputs_embeds=embeds, max_new_tokens=2, do_sample=False)
        assert wrapped.cache.reused_tokens == [0]


@pytest.mark.parametrize("family", ["gpt2", "opt", "gemma2", "llama4_text", "gpt_oss"])
def test_generate_continues_other_families(family: str) -> None:
    model = tiny(family)
    ids = random_ids(1, 70, vocabulary=VOCABULARY)
    with kvc.wrap(model, "snapkv(budget=24, window=8)") as wrapped:
        expected = wrapped.generate(ids, max_new_tokens=8, do_sample=False)
    with kvc.wrap(model, "snapkv(budget=24, window=8)", prefix_cache=PrefixCache(model)) as wrapped:
        for reused in (0, 48):
            assert torch.equal(wrapped.generate(ids, max_new_tokens=8, do_sample=False), expected)
            assert wrapped.cache.reused_tokens == [reused]


def test_a_failed_prefill_lets_go_and_leaves_the_cache_empty() -> None:
    model = deepcopy(tiny_llama())
    store = PrefixCache(model)
    with kvc.wrap(model, "snapkv(budget=48, window=8)", prefix_cache=store) as wrapped:
        wrapped.prefill(FIRST)
        stored, cache = store.nbytes, wrapped.new_cache()
        weight = model.model.norm.weight.data.clone()
        model.model.norm.weight.data.fill_(torch.nan)
        with pytest.raises(CacheError, match="NaN"):
            wrapped.prefill(SECOND, cache=cache)
        assert (store.pinned_bytes, store.nbytes, cache.columns, str(cache.method)) == (
            0,
            stored,
            0,
            str(wrapped.method),
        )
        model.model.norm.weight.data.copy_(weight)
        _, logits = run(wrapped, SECOND, cache)
        assert torch.equal(logits, run(wrapped, SECOND)[1])


def test_a_method_that_cannot_compress_leaves_the_cache_empty_too() -> None:
    model = tiny_llama()
    store = PrefixCache(model)
    with kvc.wrap(model, 'snapkv(budget="100B", window=8)', prefix_cache=store) as wrapped:
        cache = wrapped.new_cache()
        with pytest.raises(ValueError, match="a budget of 100 bytes does not hold one token"):
            wrapped.prefill(FIRST, cache=cache)
    assert (cache.columns, store.pinned_bytes, store.counts.prompts) == (0, 0, 0)
    with store.match(FIRST[0]) as found:
        assert found.tokens == 160  # exact KV all the same


@pytest.mark.parametrize("shared", [True, False])
def test_evaluate_scores_samples_with_a_common_beginning_as_without_a_prefix_cache(shared: bool) -> None:
    model, methods = tiny_llama(), ["h2o(heavy=24, recent=24)", "kivi(bits=2, group_size=8, residual=16)"]
    ids = torch.stack([torch.cat([PREFIX[:96], random_ids(60, seed=seed)]) for seed in (1, 2)])
    plain = evaluate(model, ids, methods, prefix=120, scored=6, share_prefill=shared)
    store = PrefixCache(model, checkpoint=32)
    records = evaluate(model, ids, methods, prefix=120, scored=6, share_prefill=shared, prefix_cache=store)
    for record, expected in zip(records, plain, strict=True):
        assert (record.method, record.sample, record.status) == (expected.method, expected.sample, "ok")
        assert (record.kv_bytes, record.kept_tokens) == (expected.kv_bytes, expected.kept_tokens)
        assert record.nll == pytest.approx(expected.nll, abs=1e-5) and record.kl == pytest.approx(expected.kl, abs=1e-5)
    assert {record.tokens_reused for record in plain} == {0}
    if shared:
        assert [record.tokens_reused for record in records] == [0] * len(methods) + [96] * len(methods)
    else:
        assert all(record.tokens_reused for record in records[len(methods) :])
