"""Left-padded batches over a prefix cache: every row reuses, computes and stores what it would alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvcompress as kvc
from kvcompress import CompressedCache, PrefixCache, Wrapped
from tests.families import VOCABULARY, tiny
from tests.prefix.test_prefix_cache import exact_kv
from tests.prefix.test_reuse import FIRST, METHODS, PREFIX, close, random_ids
from tests.tiny import tiny_llama

# Of the first 168 tokens are stored; the second shares 64 of them and is the longest; the third shares nothing.
ROWS = [
    torch.cat([PREFIX, random_ids(29, seed=2)]),
    torch.cat([PREFIX[:70], random_ids(110, seed=7)]),
    random_ids(50, seed=8),
    FIRST[0],
]


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, C] of rows of any lengths, padded at the left with token 0."""
    columns = max(map(len, rows))
    ids = torch.stack([torch.cat([torch.zeros(columns - len(row), dtype=row.dtype), row]) for row in rows])
    mask = torch.stack([torch.arange(columns) >= columns - len(row) for row in rows]).long()
    return ids, mask


def fed(wrapped: Wrapped, rows: list[Tensor], chunk: int | None = None) -> tuple[CompressedCache, Tensor]:
    """The cache after prefill, and the logits of the prompts' last tokens and of three more [B, 4, V]."""
    cache = wrapped.new_cache()
    ids, mask = padded(rows)
    logits = [wrapped.prefill(ids, attention_mask=mask, cache=cache, chunk=chunk).logits]
    kept = cache.fork()
    for token in (5, 6, 7):
        logits.append(wrapped(torch.full((len(rows), 1), token), cache=cache).logits)
    return kept, torch.cat(logits, 1)


def same_rows(batch: CompressedCache, alone: list[CompressedCache]) -> bool:
    for layer in range(len(batch.layers)):
        for row, one in enumerate(alone):
            mine, theirs = batch.kept(layer)[row], one.kept(layer)[0]
            if not all(torch.equal(a[a >= 0], b[b >= 0]) for a, b in zip(mine, theirs, strict=True)):
                return False
    return True


# A byte budget is one for the whole batch, so under it rows keep other tokens than alone.
@pytest.mark.parametrize("method", [method for method in METHODS if "KiB" not in method])
def test_rows_are_what_they_are_alone(method: str) -> None:
    model = tiny_llama()
    with kvc.wrap(model, method) as wrapped:
        alone = [fed(wrapped, [row]) for row in ROWS]
    store = PrefixCache(model, checkpoint=32)
    with kvc.wrap(model, method, prefix_cache=store) as wrapped:
        wrapped.prefill(FIRST)
        both = [fed(wrapped, ROWS), fed(wrapped, ROWS)]
    # The last token is computed, of snapkv a window; h2o begins at a checkpoint, others at a block.
    step, end = (32 if "h2o" in method else 16), (8 if "snapkv" in method else 1)
    for stored, (cache, logits) in zip(([128, 64, 0, 168], map(len, ROWS)), both, strict=True):
        assert cache.reused_tokens == [
            min(held, len(row) - end) // step * step for held, row in zip(stored, ROWS, strict=True)
        ]
        assert all(close(logits[[row]], theirs) for row, (_, theirs) in enumerate(alone))
        assert same_rows(cache, [one for one, _ in alone])
        assert cache.seen.tolist() == [len(row) for row in ROWS] and cache.columns == 180


def test_rows_are_stored_as_alone() -> None:
    model = tiny_llama()
    store = PrefixCache(model, checkpoint=32)
    with kvc.wrap(model, "h2o(heavy=24, recent=24)", prefix_cache=store) as wrapped:
        fed(wrapped, ROWS)
    for row in ROWS:
        with store.match(row, reserve=0) as found:
            assert found.tokens == len(row) // 16 * 16
            for layer, expected in enumerate(exact_kv(row[None])):
                for mine, theirs in zip(found.kv(layer), expected, strict=True):
                    assert close(mine, theirs[:, : found.tokens])
    assert (store.counts.prompts, store.counts.tokens) == (4, sum(map(len, ROWS)))


@given(
    lengths=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 120)), min_size=2, max_size=8),
    rows=st.integers(1, 3),
    chunk=st.sampled_from([None, 32]),
    method=st.sampled_from(
        ["exact", "snapkv(budget=24, window=8)", "h2o(heavy=12, recent=12)", 'snapkv(budget="30KiB", window=8)']
    ),
)
@settings(max_examples=12)
def test_any_batches_in_any_order(lengths: list[tuple[int, int]], rows: int, chunk: int | None, method: str) -> None:
    model, texts = tiny_llama(), [torch.cat([PREFIX[:50], random_ids(70, seed=seed)]) for seed in (1, 2, 3)]
    prompts = [texts[text][:length] for text, length in lengths]
    batches = [prompts[start : start + rows] for start in range(0, len(prompts), rows)]
    with kvc.wrap(model, method) as wrapped:
        expected = [fed(wrapped, batch, chunk) for batch in batches]
    store = PrefixCache(model, capacity=192, checkpoint=32)
    with kvc.wrap(model, method, prefix_cache=store) as wrapped:
        for batch, (plain, logits) in zip(batches, expected, strict=True):
            cache, found = fed(wrapped, batch, chunk)
            assert close(found, logits)
            assert all(torch.equal(cache.kept(layer), plain.kept(layer)) for layer in range(2))
    assert store.pinned_bytes == 0 and store.nbytes <= store.capacity_bytes


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma2", "llama4_text", "gpt_oss", "cohere"])
def test_generate_answers_padded_rows_as_alone(family: str) -> None:
    """Sliding and chunked layers, learned positions, sinks: cold, and warm."""
    model = tiny(family)
    rows = [random_ids(length, seed=length, vocabulary=VOCABULARY) for length in (70, 41, 64)]
    rows[1] = torch.cat([rows[0][:34], rows[1][:7]])
    ids, mask = padded(rows)
    options = {"max_new_tokens": 6, "do_sample": False}
    with kvc.wrap(model, "exact") as wrapped:
        alone = [wrapped.generate(row[None], **options)[0, len(row) :] for row in rows]
    store = PrefixCache(model)
    with kvc.wrap(model, "exact", prefix_cache=store) as wrapped:
        for reused in ([0, 0, 0], [64, 32, 48]):
            answers = wrapped.generate(ids, attention_mask=mask, **options)[:, 70:]
            assert all(torch.equal(*pair) for pair in zip(answers, alone, strict=True))
            assert wrapped.cache.reused_tokens == reused


def test_chunks_of_generate_are_reused_too() -> None:
    model, options = tiny_llama(), {"max_new_tokens": 4, "do_sample": False, "prefill_chunk_size": 32}
    ids, mask = padded(ROWS)
    with kvc.wrap(model, "exact") as wrapped:
        expected = wrapped.generate(ids, attention_mask=mask, **options)
    with kvc.wrap(model, "exact", prefix_cache=PrefixCache(model)) as wrapped:
        for reused in ([0, 0, 0, 0], [128, 160, 32, 160]):
            assert torch.equal(wrapped.generate(ids, attention_mask=mask, **options), expected)
            assert wrapped.cache.reused_tokens == reused
