"""The cache itself: compressing after the fact, forks, rows, rebasing, and what it refuses."""

import copy

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from transformers import PreTrainedModel

import kvcompress as kvc
from kvcompress import cache as cache_module
from kvcompress.rope import rotaries
from tests.families import VOCABULARY, tiny
from tests.oracle import oracle, recording
from tests.turns import METHODS, Script, Turn, check_kept, scripts

MODEL = tiny("llama")
SLIDING = tiny("gemma2")
IDS = torch.randint(3, VOCABULARY, (2, 70), generator=torch.Generator().manual_seed(5))
LATER = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(6))


def contents(cache: kvc.CompressedCache, layer: int, row: int) -> dict[str, Tensor]:
    """All that a layer holds of one row; what lies behind the row's end means nothing."""
    store = cache.layers[layer].store
    sizes = dict.fromkeys(store.tensors(), store.lengths[row])
    for codes in (store.open.keys, store.open.values):
        sizes[codes.kind] = store.open.tail_lengths(codes)[row]
        sizes[f"front.{codes.kind}"] = store.open.fronts[row]
        for name, part in codes.layout.items():
            sizes[f"{codes.kind}.{name}"] = codes.counts[row] // part.tokens
    return {name: tensor[row, :, : sizes[name]] for name, tensor in store.tensors().items()}


def same_state(cache: kvc.CompressedCache, other: kvc.CompressedCache) -> None:
    """Asserts that two caches hold the same tokens and, bit for bit, the same tensors."""
    assert torch.equal(cache.seen, other.seen)
    for layer, (mine, theirs) in enumerate(zip(cache.layers, other.layers, strict=True)):
        assert torch.equal(cache.kept(layer), other.kept(layer))
        assert mine.store.lengths == theirs.store.lengths
        for row in range(cache.rows):
            tensors, others = contents(cache, layer, row), contents(other, layer, row)
            assert tensors.keys() == others.keys()
            for name, tensor in tensors.items():
                assert torch.equal(tensor, others[name]), name


@pytest.mark.parametrize("method", METHODS)
@given(script=scripts(turns=1, chunks=False))
@settings(max_examples=3)
def test_compressed_afterwards_equals_a_run_of_its_own(method: str, script: Script) -> None:
    parsed = kvc.parse(method)
    if parsed.packing is not None:
        # Rows of unequal length take another kernel there, which rounds the last bit otherwise.
        script.padding = [0] * len(script.padding)
    prompt = slice(0, script.turns[0].prompt)
    with kvc.wrap(MODEL, "exact") as wrapped:
        gathered = wrapped.new_cache(gather_for=(parsed,))
        wrapped.prefill(script.ids[:, prompt], script.mask[:, prompt], gathered)
        before = gathered.fork()
        afterwards = gathered.compress_as(parsed, wrapped.rotaries())
        same_state(gathered, before)
    with kvc.wrap(MODEL, method) as wrapped:
        own = wrapped.new_cache()
        wrapped.prefill(script.ids[:, prompt], script.mask[:, prompt], own)
        same_state(afterwards, own)
        del gathered, before  # so that nothing is shared with them
        assert afterwards.memory() | {"spare": 0} == own.memory() | {"spare": 0}
        for columns in script.turns[0].decoding:
            part = torch.full((len(script.padding), columns), 7)
            assert torch.equal(wrapped(part, cache=afterwards).logits, wrapped(part, cache=own).logits)
        same_state(afterwards, own)


@pytest.mark.parametrize("model", [MODEL, SLIDING], ids=["llama", "gemma2"])
def test_one_prefill_serves_all_methods(model: PreTrainedModel) -> None:
    parsed = [kvc.parse(method) for method in METHODS if "kB" not in method]
    with kvc.wrap(model, "exact") as wrapped:
        gathered = wrapped.new_cache(gather_for=parsed)
        wrapped.prefill(IDS, cache=gathered)
        compressed = [gathered.compress_as(method, wrapped.rotaries()) for method in parsed]
    for method, cache in zip(parsed, compressed, strict=True):
        with kvc.wrap(model, method) as wrapped:
            own = wrapped.new_cache()
            wrapped.prefill(IDS, cache=own)
            for layer in range(len(own.layers)):
                assert torch.equal(cache.kept(layer), own.kept(layer)), str(method)
            found, expected = wrapped(LATER, cache=cache).logits, wrapped(LATER, cache=own).logits
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_only_what_was_gathered_can_be_compressed_afterwards() -> None:
    narrow, wide = kvc.SnapKV(budget=40, window=8), kvc.SnapKV(budget=40, window=16)
    with kvc.wrap(MODEL, "exact") as wrapped:
        cache = wrapped.new_cache(gather_for=(narrow,))
        wrapped.prefill(IDS, cache=cache)
        assert cache.compress_as(narrow).kept(0).shape[2] == 40
        for method in (wide, kvc.H2O(heavy=8, recent=8)):
            with pytest.raises(kvc.CacheError, match="did not gather"):
                cache.compress_as(method)
        wrapped(LATER, cache=cache)
        with pytest.raises(kvc.CacheError, match="right after prefill"):
            cache.compress_as(narrow)
    with kvc.wrap(MODEL, narrow) as wrapped:
        with pytest.raises(kvc.CacheError, match="only the exact method gathers"):
            wrapped.new_cache(gather_for=(wide,))
        wrapped.prefill(IDS)
        with pytest.raises(kvc.CacheError, match="only an exact cache"):
            wrapped.cache.compress_as(wide)


@pytest.mark.parametrize(
    "method",
    ["streaming_llm(sinks=2, window=14)", "h2o(heavy=6, recent=6, positions='cache')", "streaming_llm(budget=0.3)"],
)
@given(script=scripts())
@settings(max_examples=6)
def test_rebasing_positions_changes_no_distance(method: str, script: Script) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "REBASE_AFTER", 5)
        with kvc.wrap(MODEL, method) as wrapped, recording(wrapped) as calls:
            cache = wrapped.new_cache()
            script.play(wrapped, cache)
    told = oracle(MODEL, calls, rotaries(MODEL))
    assert told.error(calls) < 1e-4
    check_kept(wrapped.method, script, calls, cache, told)
    lengths = cache.layers[0].store.lengths
    assert max(first - length for first, length in zip(cache.first_position(), lengths, strict=True)) < 5


def test_a_dropped_fork_costs_nothing() -> None:
    with kvc.wrap(MODEL, "exact") as wrapped:
        wrapped.prefill(IDS)
        cache = wrapped.cache
        places = [layer.store.keys.data_ptr() for layer in cache.layers]
        fork = cache.fork()
        assert [layer.store.keys.data_ptr() for layer in fork.layers] == places
        del fork
        wrapped(LATER[:, :1], cache=cache)
        assert [layer.store.keys.data_ptr() for layer in cache.layers] == places


def test_a_deep_copy_is_a_fork() -> None:
    with kvc.wrap(MODEL, "h2o(heavy=9, recent=9)") as wrapped:
        wrapped.prefill(IDS)
        cache = wrapped.cache
        copied = copy.deepcopy(cache)
        first = wrapped(LATER, cache=copied).logits
        assert cache.seen.tolist() == [70, 70]
        assert torch.equal(wrapped(LATER, cache=cache).logits, first)
        same_state(cache, copied)


@pytest.mark.parametrize("method", METHODS)
def test_rows_can_be_reordered_dropped_and_repeated(method: str) -> None:
    mask = torch.ones_like(IDS)
    mask[1, :11] = 0
    with kvc.wrap(MODEL, method) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(IDS, mask, cache)
        wrapped(LATER, cache=cache)
        kept = [cache.kept(layer) for layer in range(2)]
        plain = wrapped(LATER, cache=cache.fork()).logits
        for change, order in (
            (lambda each: each.reorder_cache(torch.tensor([1, 0])), [1, 0]),
            (lambda each: each.reorder_cache(torch.tensor([1, 1])), [1, 1]),
            (lambda each: each.batch_select_indices(torch.tensor([1])), [1]),
            (lambda each: each.batch_repeat_interleave(2), [0, 0, 1, 1]),
        ):
            changed = cache.fork()
            change(changed)
            assert changed.seen.tolist() == [cache.seen.tolist()[row] for row in order]
            for layer in range(2):
                expected = kept[layer][order]
                assert torch.equal(changed.kept(layer), expected[..., (expected >= 0).any(0).any(0)])
            logits = wrapped(LATER[order], cache=changed).logits
            torch.testing.assert_close(logits, plain[order], rtol=0, atol=2e-5)


def test_seen_and_kept_are_counted_apart() -> None:
    mask = torch.ones_like(IDS)
    mask[1, :50] = 0
    with kvc.wrap(MODEL, "streaming_llm(sinks=2, window=28)") as wrapped:
        cache = wrapped.new_cache()
        assert cache.seen.tolist() == []
        wrapped.prefill(IDS, mask, cache)
        assert cache.get_seq_length() == 70
        assert (cache.seen.tolist(), cache.seen.dtype) == ([70, 20], torch.int64)
        kept = cache.kept(1)
    assert (kept.shape, kept.dtype) == ((2, 2, 30), torch.int64)
    assert kept[0].tolist() == [[0, 1, *range(42, 70)]] * 2
    assert kept[1].tolist() == [[*range(20), *[-1] * 10]] * 2


def test_what_a_cache_does_not_do_is_refused_by_name() -> None:
    with kvc.wrap(MODEL, "exact") as wrapped:
        wrapped.prefill(IDS)
        cache = wrapped.cache
        for wrong in (0, -1, True, 1.0):
            with pytest.raises(kvc.CacheError, match=rf"n at least 1; got {wrong!r}"):
                cache.fork(wrong)  # pyright: ignore[reportArgumentType]
        with pytest.raises(kvc.CacheError, match="holds 2 rows, but the call has 1"):
            wrapped(LATER[:1], cache=cache)
        with pytest.raises(kvc.CacheError, match="outside of a wrapped model's forward pass"):
            cache.layers[0].update(torch.zeros(2, 2, 1, 16), torch.zeros(2, 2, 1, 16))
        with pytest.raises(kvc.CacheError, match="crop"):
            cache.crop(-1)
        with pytest.raises(kvc.CacheError, match="not reset"):
            cache.reset()
        with pytest.raises(kvc.CacheError, match="assisted decoding"):
            cache.activate_past_recording()
        layer = wrapped.new_cache().layers[0]
        with pytest.raises(kvc.CacheError, match="is gone"):
            _ = layer.cache


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", METHODS[1::3])
def test_half_precision_is_stored_as_it_is_and_scored_in_single(method: str, dtype: torch.dtype) -> None:
    model = copy.deepcopy(MODEL).to(dtype)
    turns = [Turn(61, 25, [1, 6, 1])]
    with kvc.wrap(model, method) as wrapped, recording(wrapped) as calls:
        cache = wrapped.new_cache()
        Script(IDS[:, :69], [0, 9], turns).play(wrapped, cache)
    moves = wrapped.method.position_mode == "cache"
    assert oracle(model, calls, rotaries(model) if moves else None).error(calls) < 0.05
    for layer in cache.layers:
        assert {part.buffer.dtype for part in layer.store.filled} == {dtype}
        assert layer.store.scores is None or layer.store.scores.buffer.dtype == torch.float32
    assert cache.exact_nbytes == 2 * (69 + 60) * 2 * 2 * 16 * 2


def test_gather_for_takes_text_forms_and_a_single_method() -> None:
    ids = torch.randint(3, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(1))
    method = kvc.SnapKV(12, window=4)
    with kvc.wrap(MODEL, "exact") as wrapped:
        kept = []
        for asked in ((method,), method, str(method), [str(method), "h2o(budget=10)"]):
            cache = wrapped.new_cache(gather_for=asked)
            wrapped.prefill(ids, cache=cache)
            kept.append(cache.compress_as(method).kept(1))
        assert all(torch.equal(each, kept[0]) for each in kept)
        with pytest.raises(kvc.MethodError, match="snapvk"):
            wrapped.new_cache(gather_for=["snapvk(budget=12)"])
