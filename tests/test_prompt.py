"""Prompts in parts: rows are cut as they would be alone and stay in range; one that fails midway is none."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import kvcompress as kvc
from kvcompress import CacheError, Wrapped
from kvcompress.prompt import parts
from tests.bugs.common import METHODS, left_padding, text
from tests.families import OPTIONS, build, tiny
from tests.oracle import recording

TRAINED = 48
STREAMING = ["streaming_llm(sinks=2, window=30)", "streaming_llm(sinks=2, budget=0.15)", "streaming_llm(budget='9kB')"]
FAR = f"streaming_llm(sinks=0, window={2 * TRAINED})"


@cache
def short_model() -> PreTrainedModel:
    return build("llama", **OPTIONS["llama"] | {"max_position_embeddings": TRAINED})


@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4), before=st.integers(0, 5)
)
def test_each_row_is_cut_as_if_it_were_alone_and_all_end_together(rows: list[tuple[int, int]], before: int) -> None:
    counts, sizes = [count for count, _ in rows], [size for _, size in rows]
    columns = max(counts) + before
    calls = list(parts(counts, columns, lambda: sizes))
    for row, (count, size) in enumerate(rows):
        own = [(call.starts[row], call.counts[row]) for call in calls if call.counts[row]]
        assert [taken for _, taken in own] == [size] * (count // size) + [count % size] * (count % size > 0)
        assert [start for start, _ in own] == list(range(columns - count, columns, size))
        assert calls[-1].counts[row]


@pytest.mark.parametrize("method", STREAMING)
@pytest.mark.parametrize("feed", [Wrapped.prefill, Wrapped.generate], ids=["prefill", "generate"])
def test_no_turn_runs_more_slots_at_once_than_the_model_was_trained_on(
    method: str, feed: Callable[..., object]
) -> None:
    with kvc.wrap(short_model(), method) as wrapped, recording(wrapped) as calls:
        over = wrapped.new_cache()
        for turn, columns in enumerate((100, 44, 3, 47)):
            options = {"max_new_tokens": 2, "do_sample": False} if feed is Wrapped.generate else {}
            feed(wrapped, text(1, columns, seed=turn), cache=over, **options)
    slots = [call.kept[0].shape[2] + call.counts[0] for call in calls]
    assert max(slots) <= TRAINED
    assert sum(call.counts[0] for call in calls) == over.seen.item()
    assert len(calls) > 8


def test_where_what_is_kept_is_more_than_the_model_was_trained_on_the_prompt_is_cut_all_the_same() -> None:
    with kvc.wrap(short_model(), FAR) as wrapped, recording(wrapped) as calls:
        wrapped.prefill(text(1, 3 * TRAINED))
    assert {call.counts[0] for call in calls} == {TRAINED // 4}


@pytest.mark.parametrize("method", STREAMING[:2])
@pytest.mark.parametrize("padding", [(0, 70, 83), (12, 61, 0)])
def test_rows_of_a_batch_past_the_trained_length_are_the_rows_alone(method: str, padding: tuple[int, ...]) -> None:
    """A row that fits goes at once, as it would alone, though others of the batch go in parts."""
    first, second = text(3, 100), text(3, 40, seed=2)
    with kvc.wrap(short_model(), method) as wrapped:
        batch = wrapped.new_cache()
        found = [
            wrapped.prefill(first, left_padding(100, *padding), batch).logits,
            wrapped.prefill(second, left_padding(40, 0, 39, 7), batch).logits,
            wrapped(second[:, :1], cache=batch).logits,
        ]
        for row, skipped in enumerate(padding):
            alone = wrapped.new_cache()
            expected = [
                wrapped.prefill(first[row : row + 1, skipped:], cache=alone).logits,
                wrapped.prefill(second[row : row + 1, (0, 39, 7)[row] :], cache=alone).logits,
                wrapped(second[row : row + 1, :1], cache=alone).logits,
            ]
            for mine, own in zip(found, expected, strict=True):
                torch.testing.assert_close(mine[row], own[0], rtol=1e-4, atol=1e-4)
            for layer in range(2):
                kept = batch.kept(layer)[row]
                assert torch.equal(kept[:, (kept >= 0).any(0)], alone.kept(layer)[0])


@pytest.mark.parametrize("method", METHODS)
@given(
    chunk=st.integers(3, 30), padding=st.tuples(*[st.integers(0, 30)] * 2), later=st.tuples(*[st.integers(0, 19)] * 2)
)
@settings(max_examples=4)
def test_rows_of_two_padded_turns_in_chunks_are_the_rows_alone(
    method: str, chunk: int, padding: tuple[int, int], later: tuple[int, int]
) -> None:
    turns = [(text(2, 31), padding), (text(2, 20, seed=2), later)]
    with kvc.wrap(tiny("llama"), method) as wrapped:
        batch = wrapped.new_cache()
        for ids, before in turns:
            found = wrapped.prefill(ids, left_padding(ids.shape[1], *before), batch, chunk).logits
        assert batch.get_seq_length() == 51
        for row in range(2):
            alone = wrapped.new_cache()
            for ids, before in turns:
                expected = wrapped.prefill(ids[row : row + 1, before[row] :], cache=alone, chunk=chunk).logits
            torch.testing.assert_close(found[row], expected[0], rtol=1e-3, atol=1e-3)
            for layer in range(2):
                kept = batch.kept(layer)[row]
                assert torch.equal(kept[:, (kept >= 0).any(0)], alone.kept(layer)[0])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("after", [0, 1])
def test_a_prompt_that_fails_between_two_calls_is_no_prompt(method: str, filled: bool, after: int) -> None:
    ids, calls = text(1, 30), []

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt

    with kvc.wrap(tiny("llama"), method) as wrapped:
        over = wrapped.new_cache()
        if filled:
            wrapped.prefill(ids, cache=over)
        fork = over.fork()
        hook = wrapped.model.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            wrapped.prefill(ids, cache=over, chunk=12)
        hook.remove()
        if after == 0:
            expected, found = (wrapped(ids[:, :3], cache=each).logits for each in (fork, over))
            assert torch.equal(found, expected)
            return
        for go_on in (wrapped, wrapped.prefill, lambda ids, cache: cache.save("nowhere")):
            with pytest.raises(
                CacheError, match=r"the last prompt fed to this cache failed midway, after \d\d columns"
            ):
                go_on(ids[:, :1], cache=over)
        assert torch.isfinite(wrapped(ids[:, :1], cache=fork).logits).all()
