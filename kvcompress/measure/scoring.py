"""What decoding behind a compressed prompt gives: predictions, and times beside those of the exact cache.

T scored tokens, V the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompress.cache import CompressedCache
from kvcompress.measure.decoding import columns_per_call
from kvcompress.measure.prefilled import Prefilled
from kvcompress.measure.record import Record
from kvcompress.measure.speed import Paired, paired
from kvcompress.measure.stored import evicted_rows, packed_rows, stored_bytes
from kvcompress.wrapping import Wrapped

TIMED_TOKENS, WARM_TOKENS = 32, 2


@dataclass
class Scores:
    """Log-probabilities [T, V] fp32 of what each scored token predicts, and what was seen on the way.

    `times` are of single-token calls, in turns with the exact cache's. `evicted` and `packed` say what had happened to
    the cache when the last scored token was fed.
    """

    log_probabilities: Tensor
    times: Paired
    kv_bytes_end: int
    evicted: bool
    packed: bool


def ask(wrapped: Wrapped, cache: CompressedCache, question: Tensor | None) -> None:
    """Feeds a question [1, any number of tokens] to a filled cache."""
    if question is not None and question.shape[1]:
        for part in question.split(columns_per_call(cache), 1):
            wrapped(part, cache=cache)


def score(wrapped: Wrapped, cache: CompressedCache, feed: Tensor, exact: CompressedCache) -> Scores:
    """Feeds the scored ids [1, T]. `exact` is the exact cache at the same token; it stays as it is.

    The first steps are timed in turns with the same steps over a fork of `exact`, all but the last of T; where a call
    may feed more than one token, they are steps of a fork.
    """
    columns = feed.shape[1]
    per_call = columns_per_call(cache)
    timed_columns = min(WARM_TOKENS + TIMED_TOKENS, max(1, columns - 1))
    warm = min(WARM_TOKENS, timed_columns - 1)
    evicted, packed = _changes(cache)
    logits: list[Tensor] = []

    def steps(over: CompressedCache) -> Iterator[Tensor]:
        for token in feed[:, :timed_columns].split(1, 1):
            yield wrapped(token, cache=over).logits

    def in_turns(own: Iterator[Tensor], other: Iterator[Tensor]) -> Paired:
        return paired(lambda: logits.append(next(own)), lambda: next(other), feed.device, timed_columns - warm, warm)

    times = in_turns(steps(cache if per_call == 1 else cache.fork()), steps(exact.fork()))
    if per_call > 1:
        logits = [wrapped(part, cache=cache).logits for part in feed.split(per_call, 1)]
    for column in range(timed_columns if per_call == 1 else columns, columns):
        if column == columns - 1:
            evicted, packed = _changes(cache)
        logits.append(wrapped(feed[:, column : column + 1], cache=cache).logits)
    log_probabilities = torch.cat(logits, 1)[0].float().log_softmax(-1)
    return Scores(log_probabilities, times, stored_bytes(cache), evicted, packed)


def _changes(cache: CompressedCache) -> tuple[bool, bool]:
    return evicted_rows(cache)[0], packed_rows(cache)[0]


def fill(record: Record, prefilled: Prefilled, scores: Scores, exact: Scores, targets: Tensor, kl: Tensor) -> None:
    """Puts the measured numbers into `record`; `targets` [T] are the ids to predict, `kl` [T] as `divergence` gives."""
    mine, theirs, times = scores.log_probabilities, exact.log_probabilities, scores.times
    record.nll, record.nll_exact = _nll(mine, targets), _nll(theirs, targets)
    record.ppl, record.ppl_exact = math.exp(record.nll), math.exp(record.nll_exact)
    record.kl = float(kl.mean())
    record.top1_agreement = float((mine.argmax(-1) == theirs.argmax(-1)).float().mean())
    record.kv_bytes, record.kv_bytes_end = prefilled.kv_bytes, scores.kv_bytes_end
    record.kv_bytes_exact = prefilled.kv_bytes_exact
    record.memory_ratio = prefilled.kv_bytes_exact / prefilled.kv_bytes
    record.memory_ratio_16bit = record.memory_ratio * 2 / prefilled.itemsize
    record.bits_per_value = prefilled.kv_bytes * 8 / prefilled.kept_values
    record.kept_tokens = prefilled.kept_tokens
    record.evicted, record.packed = scores.evicted, scores.packed
    record.decode_ms_per_token, record.decode_ms_per_token_exact = times.own_ms, times.other_ms
    record.decode_ratios = [round(ratio, 4) for ratio in times.ratios]
    record.prefill_s, record.prefill_shared = prefilled.prefill_s, prefilled.shared
    record.compress_s, record.tokens_reused = prefilled.compress_s, sum(prefilled.cache.reused_tokens)
    record.peak_bytes, record.peak_of = prefilled.peak.nbytes, prefilled.peak.of


def _nll(log_probabilities: Tensor, targets: Tensor) -> float:
    """Mean negative log-likelihood of `targets` [T] in nats."""
    return float(-log_probabilities.gather(-1, targets[:, None]).mean())


def divergence(exact: Tensor, other: Tensor) -> Tensor:
    """KL(exact || other) in nats of each token [T], from log-probabilities [T, V]; rounding may leave it below 0."""
    return (exact.exp() * (exact - other)).sum(-1)
