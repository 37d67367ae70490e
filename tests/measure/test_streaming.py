"""Streaming gives what the plain model gives for the same tokens in sight, whatever the calls and the buckets."""

import math

import pytest
import torch
from torch import Tensor

import kvcompress as kvc
from kvcompress.measure.streaming import Bucket, bucket_ends, recompute, stream
from tests.tiny import tiny_llama

TOKENS = 90


def ids(rows: int = 2) -> Tensor:
    return torch.randint(0, 256, (rows, TOKENS + 1), generator=torch.Generator().manual_seed(7))


def streamed(method: str, ends: list[int], **options: int) -> list[Bucket]:
    with kvc.wrap(tiny_llama(), method) as wrapped:
        return [bucket for bucket, _ in stream(wrapped, ids(), ends, **options)]


def masked_nll(visible: Tensor) -> Tensor:
    """NLL [B, TOKENS] of the plain model where query i sees the keys `visible[i]` [TOKENS, TOKENS]."""
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits = tiny_llama()(ids()[:, :-1], attention_mask=mask.expand(2, 1, -1, -1), use_cache=False).logits
    return -logits.log_softmax(-1).gather(-1, ids()[:, 1:, None])[..., 0]


def causal() -> Tensor:
    return torch.ones(TOKENS, TOKENS).tril().bool()


@pytest.mark.parametrize("tokens_per_call", [1, 7])
@pytest.mark.parametrize("prefix", [1, 20])
def test_the_exact_method_gives_the_plain_model(tokens_per_call: int, prefix: int) -> None:
    buckets = streamed("exact", [33, 66, TOKENS], tokens_per_call=tokens_per_call, prefix=prefix)
    nll = torch.cat([bucket.nll for bucket in buckets], 1)
    torch.testing.assert_close(nll, masked_nll(causal())[:, prefix:], atol=2e-5, rtol=1e-5)
    assert [bucket.kept_tokens for bucket in buckets] == [33, 66, TOKENS]


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("tokens_per_call", [1, 4])
def test_a_window_gives_the_plain_model_that_sees_no_more(sinks: int, tokens_per_call: int) -> None:
    """With `tokens_per_call` above 1 a token sees the window as it was when its call began, and the call's own."""
    window, prefix, timed = 12, 1, 3
    ends = [30, 61, TOKENS]
    buckets = streamed(
        f'streaming_llm(sinks={sinks}, window={window}, positions="original")',
        ends,
        tokens_per_call=tokens_per_call,
        timed_tokens=timed,
    )
    call_begin = torch.arange(TOKENS)
    for begin, end in zip([prefix, *ends], ends, strict=False):
        for column in range(begin, end - timed):
            call_begin[column] = column - (column - begin) % tokens_per_call
    keys = torch.arange(TOKENS)
    visible = causal() & ((keys < sinks) | (keys >= call_begin[:, None] - window))
    nll = torch.cat([bucket.nll for bucket in buckets], 1)
    torch.testing.assert_close(nll, masked_nll(visible)[:, prefix:], atol=2e-5, rtol=1e-5)
    assert len({bucket.kv_bytes for bucket in buckets}) == 1
    # Two layers of 2 KV heads, D = 16, two rows: the window and the sinks in fp32, an int32 position each.
    assert buckets[0].kv_bytes == 2 * 2 * (sinks + window) * (2 * 2 * 16 * 4 + 4)


def test_splitting_into_buckets_changes_nothing() -> None:
    whole = streamed("h2o(heavy=8, recent=8)", [TOKENS])
    parts = streamed("h2o(heavy=8, recent=8)", [10, 50, TOKENS])
    assert torch.equal(whole[0].nll, torch.cat([bucket.nll for bucket in parts], 1))


def test_recomputation_is_the_plain_model_on_the_last_tokens() -> None:
    window, every = 16, 5
    buckets = list(recompute(tiny_llama(), ids(), [33, 66, TOKENS], window, every))
    got = torch.cat([bucket.nll for bucket in buckets], 1)
    expected = []
    for last in range(every - 1, TOKENS, every):
        shown = ids()[:, max(0, last - window + 1) : last + 1]
        with torch.no_grad():
            logits = tiny_llama()(shown, use_cache=False).logits[:, -1]
        expected.append(-logits.log_softmax(-1).gather(-1, ids()[:, last + 1, None])[:, 0])
    torch.testing.assert_close(got, torch.stack(expected, 1), atol=2e-5, rtol=1e-5)
    assert buckets[-1].kv_bytes == 2 * 2 * window * 2 * 2 * 16 * 4
    assert buckets[-1].kv_bytes_exact == 2 * 2 * TOKENS * 2 * 2 * 16 * 4


def test_what_begins_in_the_middle_goes_on_there() -> None:
    method, ends = "streaming_llm(sinks=2, window=12)", [30, 60, TOKENS]
    whole = streamed(method, ends)
    with kvc.wrap(tiny_llama(), method) as wrapped:
        first = stream(wrapped, ids(), ends)
        _, cache = next(first)
        rest = [bucket for bucket, _ in stream(wrapped, ids(), ends, cache=cache.fork())]
    assert [bucket.index for bucket in rest] == [1, 2]
    assert all(torch.equal(mine.nll, theirs.nll) for mine, theirs in zip(rest, whole[1:], strict=True))


def test_bucket_ends() -> None:
    assert bucket_ends(1000, 300) == [300, 600, 900, 1000]
    assert bucket_ends(900, 300) == [300, 600, 900]
    assert bucket_ends(50, 300) == [50]
    assert bucket_ends(1000, "doubling") == [64, 128, 256, 512, 1000]
    assert bucket_ends(64, "doubling") == [64]
    assert bucket_ends(1000, 300, prefix=300) == [600, 900, 1000]


def test_a_perplexity_too_large_for_a_float_is_still_a_number() -> None:
    from kvcompress.measure.streaming import StreamRecord

    record = StreamRecord("exact", "m", "float32", "cpu", "", "", 0, 0, 1, 1)
    Bucket(0, torch.tensor([[1e4, 1e4]]), 1, 1, 1, (0.5, 1.0, 2.0), 1.0).fill(record)
    assert (record.ms_per_call, record.ms_per_call_quartiles) == (1.0, [0.5, 2.0])
    assert record.nll == 1e4
    assert record.ppl is not None and math.isfinite(record.ppl)
    assert StreamRecord.from_json(record.to_json()) == record
