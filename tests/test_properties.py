"""What is always true, for every method and composition, over random texts, paddings, chunks and turns."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvcompress as kvc
from kvcompress.kernels.pack import naive
from kvcompress.rope import rotaries
from tests.families import VOCABULARY, tiny
from tests.oracle import oracle, recording
from tests.reachable import reachable_bytes
from tests.turns import METHODS, Script, Turn, check_kept, scripts

MODEL = tiny("llama")
TURNING = rotaries(MODEL)
every_method = pytest.mark.parametrize("method", METHODS)
# A size in bytes is shared by the rows of a batch, so a row of a batch keeps fewer tokens than alone.
every_method_of_rows = pytest.mark.parametrize("method", [method for method in METHODS if "kB" not in method])
GENEROUS = [
    "streaming_llm(sinks=2, window=600)",
    "streaming_llm(budget='9MB', positions='original')",
    "snapkv(budget=600, window=6)",
    "snapkv(budget=1.0, window=6, positions='cache')",
    "kivi(bits=2, group_size=8, residual=600)",
    "snapkv(budget=600, window=6) | kivi(bits=2, group_size=8, residual=600)",
    "streaming_llm(sinks=2, window=600) | kivi(bits=2, group_size=8, residual=600)",
    "h2o(heavy=300, recent=300)",
    "h2o(budget='9MB', positions='cache')",
    "h2o(heavy=300, recent=600) | kivi(bits=4, group_size=8, residual=600)",
]


def played(method: str, script: Script) -> tuple[kvc.CompressedCache, list[Tensor]]:
    """The cache at the end of the script, and the logits of every call."""
    with kvc.wrap(MODEL, method) as wrapped, recording(wrapped) as calls:
        cache = wrapped.new_cache()
        script.play(wrapped, cache)
    return cache, [call.logits for call in calls]


def difference(logits: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest logit."""
    return float((logits - expected).abs().max() / expected.abs().max())


@every_method
@given(script=scripts())
@settings(max_examples=6)
def test_logits_and_kept_tokens_are_those_of_the_masked_plain_model(method: str, script: Script) -> None:
    with kvc.wrap(MODEL, method) as wrapped, recording(wrapped) as calls:
        cache = wrapped.new_cache()
        script.play(wrapped, cache)
    moves = wrapped.method.position_mode == "cache"
    told = oracle(MODEL, calls, TURNING if moves else None)
    assert told.error(calls) < 1e-4
    check_kept(wrapped.method, script, calls, cache, told)


@pytest.mark.parametrize("method", GENEROUS)
@given(script=scripts())
@settings(max_examples=4)
def test_a_budget_beyond_the_text_changes_nothing(method: str, script: Script) -> None:
    cache, logits = played(method, script)
    exact, expected = played("exact", script)
    for layer in range(len(cache.layers)):
        assert torch.equal(cache.kept(layer), exact.kept(layer))
    for found, wanted in zip(logits, expected, strict=True):
        if method.startswith("h2o"):  # sums its columns in another kernel
            assert difference(found, wanted) < 1e-5
        else:
            assert torch.equal(found, wanted)


@given(script=scripts())
@settings(max_examples=15)
def test_exact_equals_the_unwrapped_model_for_any_split(script: Script) -> None:
    _, logits = played("exact", script)
    mask = script.mask
    with torch.no_grad():
        plain = MODEL(script.ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    stops = list(script.padding)
    for found, counts in zip(logits, script.calls, strict=True):
        for row, count in enumerate(counts):
            stops[row] += count
            width = min(found.shape[1], count)
            if width:
                expected = plain[row, stops[row] - width : stops[row]]
                assert difference(found[row, found.shape[1] - width :], expected) < 1e-5


@every_method_of_rows
@given(script=scripts())
@settings(max_examples=5)
def test_a_row_of_a_padded_batch_is_that_row_alone(method: str, script: Script) -> None:
    batch, logits = played(method, script)
    for row, padding in enumerate(script.padding):
        first, *later = script.turns
        own = Script(
            script.ids[row : row + 1, padding:],
            [0],
            [Turn(first.prompt - padding, first.chunk, first.decoding), *later],
        )
        alone, own_logits = played(method, own)
        for layer in range(len(batch.layers)):
            kept = batch.kept(layer)[row]
            assert torch.equal(kept[:, (kept >= 0).any(0)], alone.kept(layer)[0])
            for codes, own_codes in zip(codes_of(batch, layer, row), codes_of(alone, layer, 0), strict=True):
                assert codes.shape == own_codes.shape
                # Rounding of the keys themselves may tip the one or other code over.
                assert (codes.int() - own_codes.int()).abs().sum() <= 2
        # A shorter row's prompt may need fewer calls; it begins later then. Of a prompt only last tokens are told.
        for found, wanted in zip(logits[::-1], own_logits[::-1], strict=False):
            assert difference(found[row], wanted[0]) < 1e-3


def codes_of(cache: kvc.CompressedCache, layer: int, row: int) -> list[Tensor]:
    """Key codes [H, packed, D] and value codes [H, packed, D] of a row."""
    store = cache.layers[layer].store
    found = []
    if store.packs is not None:
        for codes, dim in ((store.open.keys, 3), (store.open.values, 2)):
            count = codes.counts[row]
            if count:
                words = codes.parts["words"].view[row : row + 1]
                each = naive.unpack_words(words, codes.format.bits, dim, words.shape[2] * 99 if dim == 2 else 16)
                each = each.transpose(-1, -2).flatten(2, 3) if dim == 3 else each
                found.append(each[0, :, :count])
    return found


@every_method
@given(long=scripts(turns=1), short=scripts(turns=1, longest=20))
@settings(max_examples=2)
def test_nothing_leaks_into_the_next_text(method: str, long: Script, short: Script) -> None:
    probe = torch.arange(3, 20)[None]
    with torch.no_grad():
        before = MODEL(probe).logits
    with kvc.wrap(MODEL, method) as wrapped, recording(wrapped) as calls:
        long.play(wrapped, wrapped.new_cache())
        used, cache = len(calls), wrapped.new_cache()
        short.play(wrapped, cache)
    fresh, logits = played(method, short)
    for found, wanted in zip(calls[used:], logits, strict=True):
        assert torch.equal(found.logits, wanted)
    for layer in range(len(cache.layers)):
        assert torch.equal(cache.kept(layer), fresh.kept(layer))
    assert cache.nbytes == fresh.nbytes
    with torch.no_grad():
        assert torch.equal(MODEL(probe).logits, before)


@every_method
@given(script=scripts(), copies=st.integers(1, 3))
@settings(max_examples=3)
def test_bytes_are_those_of_the_storages_that_a_cache_reaches(method: str, script: Script, copies: int) -> None:
    def check(cache: kvc.CompressedCache) -> None:
        memory = cache.memory()
        assert cache.nbytes == sum(memory.values()) == reachable_bytes(cache, not_from=[MODEL, wrapped._rotaries])
        assert min(memory.values()) >= 0
        for layer in cache.layers:
            sizes = layer.memory()
            full = layer.shape.exact_bytes(64) * cache.rows if layer.shape else 0
            per_slot = 64 * cache.rows * layer.shape.heads * 8 if layer.shape else 0  # positions and scores
            assert sizes["spare"] <= max(full + per_slot, (sum(sizes.values()) - sizes["spare"]) / 8)

    with kvc.wrap(MODEL, method) as wrapped:
        cache = wrapped.new_cache()
        script.play(wrapped, cache, after=lambda _: check(cache))
        fork = cache.fork(copies)
        check(fork)
        wrapped(torch.full((fork.rows, 1), 5), cache=fork)
        check(fork)
        check(cache)


@pytest.mark.parametrize("method", METHODS[1:])
def test_bytes_fall_when_tokens_are_evicted_or_packed(method: str) -> None:
    ids = torch.randint(3, VOCABULARY, (2, 400), generator=torch.Generator().manual_seed(3))
    sizes = []
    for each in ("exact", method):
        with kvc.wrap(MODEL, each) as wrapped:
            wrapped.prefill(ids)
            sizes.append(wrapped.cache.nbytes)
    assert sizes[1] < 0.85 * sizes[0]


def replay(wrapped: kvc.Wrapped, prompt: Tensor, mask: Tensor, new: Tensor) -> Tensor:
    """Logits [new, V] that one row's own run gives before each of its generated tokens."""
    cache = wrapped.new_cache()
    real = mask.bool()
    logits = [wrapped.prefill(prompt[real][None], cache=cache).logits[0, -1]]
    for token in new[:-1]:
        logits.append(wrapped(token[None, None], cache=cache).logits[0, -1])
    return torch.stack(logits)


def prompts(seed: int) -> tuple[Tensor, Tensor]:
    """Two rows of 37 ids, the second with 6 columns of padding."""
    ids = torch.randint(3, VOCABULARY, (2, 37), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    return ids, mask


@every_method_of_rows
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 1.5, "top_k": 20, "num_return_sequences": 2},
    ],
    ids=["greedy", "sampling"],
)
def test_generated_rows_are_the_rows_own_runs(method: str, options: dict[str, Any]) -> None:
    ids, mask = prompts(1)
    copies = options.get("num_return_sequences", 1)
    torch.manual_seed(0)
    with kvc.wrap(MODEL, method) as wrapped:
        out = wrapped.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=6,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            **options,
        )
        assert wrapped.cache.rows == 2 * copies
        for row, sequence in enumerate(out.sequences):
            expected = replay(wrapped, ids[row // copies], mask[row // copies], sequence[37:])
            assert difference(torch.stack([step[row] for step in out.logits]), expected) < 1e-4


@every_method_of_rows
def test_the_score_of_a_beam_is_that_of_its_own_run(method: str) -> None:
    ids, mask = prompts(2)
    with kvc.wrap(MODEL, method) as wrapped:
        out = wrapped.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=7,
            num_beams=3,
            num_return_sequences=2,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=0,
        )
        for row, sequence in enumerate(out.sequences):
            new = sequence[37:]
            logits = replay(wrapped, ids[row // 2], mask[row // 2], new)
            score = logits.log_softmax(-1).gather(-1, new[:, None]).sum() / len(new)
            assert abs(score - out.sequences_scores[row]) < 1e-4


@every_method_of_rows
def test_generate_in_chunks_is_one_prefill_in_chunks(method: str) -> None:
    ids, mask = prompts(3)
    chunk = 5  # the first one is all padding in the second row
    with kvc.wrap(MODEL, method) as wrapped:
        out = wrapped.generate(
            ids, attention_mask=mask, max_new_tokens=4, do_sample=False, prefill_chunk_size=chunk, pad_token_id=0
        )
        generated = wrapped.cache
        cache = wrapped.new_cache()
        logits = wrapped.prefill(ids, attention_mask=mask, cache=cache, chunk=chunk).logits
        for step in range(3):
            assert torch.equal(logits[:, -1].argmax(-1), out[:, 37 + step])
            logits = wrapped(out[:, 37 + step : 38 + step], cache=cache).logits
        for layer in range(len(cache.layers)):
            assert torch.equal(cache.kept(layer), generated.kept(layer))


@every_method
@given(script=scripts(turns=1, rows=2), copies=st.integers(1, 3), seed=st.integers(0, 2**31))
@settings(max_examples=2)
def test_forks_never_disturb_each_other(method: str, script: Script, copies: int, seed: int) -> None:
    copies = 1 if "kB" in method else copies  # a size in bytes is shared by the rows of a fork
    generator = torch.Generator().manual_seed(seed)
    rows = len(script.padding)
    texts = torch.randint(3, VOCABULARY, (copies + 1, rows, 20), generator=generator)
    with kvc.wrap(MODEL, method) as wrapped:
        cache = wrapped.new_cache()
        script.play(wrapped, cache)
        own = [cache.fork() for _ in texts]
        batch = cache.fork(copies)
        alone: list[list[Tensor]] = [[] for _ in texts]
        together = []
        for start in range(0, 20, 4):
            part = slice(start, start + 4)
            for number, text in enumerate(texts):
                alone[number].append(wrapped(text[:, part], cache=own[number]).logits)
            rows_of_batch = texts[:copies, :, part].transpose(0, 1).flatten(0, 1)
            together.append(wrapped(rows_of_batch, cache=batch).logits.unflatten(0, (rows, copies)))
        again = [wrapped(texts[0][:, start : start + 4], cache=cache).logits for start in range(0, 20, 4)]
    for found, wanted in zip(again, alone[0], strict=True):
        assert torch.equal(found, wanted)
    for layer in range(len(cache.layers)):
        assert torch.equal(cache.kept(layer), own[0].kept(layer))
        for copy in range(copies):
            assert torch.equal(batch.kept(layer)[copy::copies], own[copy].kept(layer))
    for copy in range(copies):
        for found, wanted in zip(together, alone[copy], strict=True):
            assert difference(found[:, copy], wanted) < 1e-3


@every_method
def test_a_second_turn_of_generate_is_a_second_prefill(method: str) -> None:
    ids, mask = prompts(4)
    chunk = 9 if METHODS.index(method) % 2 else None
    question = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(9))
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "prefill_chunk_size": chunk}
    with kvc.wrap(MODEL, method) as wrapped:
        cache, own = wrapped.new_cache(), wrapped.new_cache()
        first = wrapped.generate(ids, cache=cache, attention_mask=mask, **options)
        # The last token that was generated has not been fed.
        turn = torch.cat([first[:, -1:], question], 1)
        second = wrapped.generate(turn, cache=cache, **options)
        wrapped.prefill(ids, mask, own, chunk)
        for column in range(37, 41):
            wrapped(first[:, column : column + 1], cache=own)
        logits = wrapped.prefill(turn, cache=own, chunk=chunk).logits
        for column in range(13, 18):
            assert torch.equal(logits[:, -1].argmax(-1), second[:, column])
            if column < 17:
                logits = wrapped(second[:, column : column + 1], cache=own).logits
    assert cache.seen.tolist() == own.seen.tolist() == [58, 52]
    for layer in range(len(cache.layers)):
        assert torch.equal(cache.kept(layer), own.kept(layer))
