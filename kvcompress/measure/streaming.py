"""Perplexity, time and stored bytes along a text of any length, fed a few tokens at a time.

B segments of a text are fed as the rows of a batch; token i of a row predicts token i + 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from kvcompress.cache import CompressedCache
from kvcompress.measure.record import JsonLine, versions
from kvcompress.measure.speed import quartiles, timed
from kvcompress.measure.stored import kept_tokens, stored_bytes
from kvcompress.methods.exact import Exact
from kvcompress.wrapping import Wrapped, wrap


@dataclass
class StreamRecord(JsonLine):
    """One (method, bucket) pair: what the tokens `begin` to `end` of every segment gave.

    `nll` is the mean over `tokens_scored` tokens of all segments in nats, `nll_segments` that of each. Bytes are of
    the KV of all segments when the bucket ends, spare apart. `ms_per_call` is the median of calls of one token a
    segment (for recomputation, of one window a segment), `ms_per_call_quartiles` the lower and the upper quartile.
    Status "stopped" says in `error` why no more was fed.
    """

    method: str
    model: str
    dtype: str
    device: str
    data_hash: str
    config_hash: str
    bucket: int
    begin: int
    end: int
    segments: int
    tokens_per_call: int | None = None
    tokens_scored: int | None = None
    nll: float | None = None
    ppl: float | None = None
    nll_segments: list[float] | None = None
    kv_bytes: int | None = None
    kv_bytes_exact: int | None = None
    kept_tokens: int | None = None
    ms_per_call: float | None = None
    ms_per_call_quartiles: list[float] | None = None
    seconds: float | None = None
    kernels: str | None = None
    settings: dict[str, Any] | None = None
    seed: int | None = None
    versions: dict[str, str] = field(default_factory=versions)
    status: str = "ok"
    error: str | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What a later record of the same measurement has in common with it."""
        return self.config_hash, self.bucket


@dataclass
class Bucket:
    """What one bucket gave: NLL in nats [B, T] of its scored tokens, and what the cache held at its end.

    `ms_per_call` is the lower quartile, the median and the upper quartile.
    """

    index: int
    nll: Tensor
    kv_bytes: int
    kv_bytes_exact: int
    kept_tokens: int
    ms_per_call: tuple[float, float, float]
    seconds: float

    def fill(self, record: StreamRecord) -> None:
        """Puts the measured numbers into `record`."""
        record.tokens_scored = self.nll.numel()
        record.nll = float(self.nll.double().mean())
        record.ppl = math.exp(min(record.nll, 700.0))
        record.nll_segments = self.nll.double().mean(1).tolist()
        record.kv_bytes, record.kv_bytes_exact = self.kv_bytes, self.kv_bytes_exact
        record.kept_tokens = self.kept_tokens
        low, record.ms_per_call, high = self.ms_per_call
        record.ms_per_call_quartiles, record.seconds = [low, high], self.seconds


def bucket_ends(tokens: int, bucket: int | str, prefix: int = 1) -> list[int]:
    """Where the buckets of `tokens` fed tokens end: every `bucket` tokens, or with "doubling" at 64, 128, 256, …

    The first bucket begins behind the `prefix`; the last one may be shorter.
    """
    if bucket == "doubling":
        inner = [2**power for power in range(6, max(6, tokens.bit_length() + 1))]
    else:
        inner = list(range(int(bucket), tokens, int(bucket)))
    return [*(end for end in inner if prefix < end < tokens), tokens]


def stream(
    wrapped: Wrapped,
    ids: Tensor,
    ends: Sequence[int],
    *,
    prefix: int = 1,
    tokens_per_call: int = 1,
    timed_tokens: int = 8,
    cache: CompressedCache | None = None,
) -> Iterator[tuple[Bucket, CompressedCache]]:
    """Feeds `ids` [B, at least ends[-1] + 1] through one cache: `prefix` tokens as the prompt, all others as decoding.

    A bucket with the cache at its end is given at each of `ends`, which ascend and lie above `prefix`. With more than
    one token a call, a method that acts on every call evicts once a call: right before it acts, the cache holds up to
    `tokens_per_call - 1` tokens more than with one token a call. The last `timed_tokens` of a bucket are fed one by
    one, so that times are those of single tokens. A filled `cache` goes on at the bucket that it reached.
    """
    if ids.shape[1] < ends[-1] + 1:
        raise ValueError(f"{ids.shape[1]} ids are too few: {ends[-1]} are fed and one more is predicted")
    ids = ids.to(wrapped.model.device)
    cache = wrapped.new_cache() if cache is None else cache
    if not cache.columns:
        wrapped.prefill(ids[:, :prefix], cache=cache)
    for index, end in enumerate(ends):
        begin = max(prefix, ends[index - 1] if index else 0)
        if end <= cache.columns:
            continue
        with timed(ids.device) as elapsed:
            losses, times = _feed(wrapped, cache, ids, begin, end, tokens_per_call, timed_tokens)
        stored, kept = stored_bytes(cache), kept_tokens(cache)
        ms = quartiles([seconds * 1000 for seconds in times])
        yield Bucket(index, torch.cat(losses, 1), stored, cache.exact_nbytes, kept, ms, elapsed.seconds), cache


def _feed(
    wrapped: Wrapped, cache: CompressedCache, ids: Tensor, begin: int, end: int, tokens_per_call: int, timed_tokens: int
) -> tuple[list[Tensor], list[float]]:
    losses, times = [], []
    singles = max(begin, end - timed_tokens)
    column = begin
    while column < end:
        width = 1 if column >= singles else min(tokens_per_call, singles - column)
        with timed(ids.device) as elapsed:
            logits = wrapped(ids[:, column : column + width], cache=cache).logits
        if width == 1:
            times.append(elapsed.seconds)
        losses.append(_nll(logits, ids[:, column + 1 : column + width + 1]))
        column += width
    return losses, times


def recompute(
    model: PreTrainedModel, ids: Tensor, ends: Sequence[int], window: int, every: int, prefix: int = 1
) -> Iterator[Bucket]:
    """Sliding-window recomputation (arXiv 2309.17453, figure 1c): each token encodes the last `window` anew.

    It keeps no KV between tokens; only every `every`-th token is predicted. The bytes
    are those of the window's KV while it is in use. `ids` [B, at least ends[-1] + 1].
    """
    ids = ids.to(model.device)
    with wrap(model, Exact()) as wrapped:
        for index, end in enumerate(ends):
            begin = max(prefix, ends[index - 1] if index else 0)
            losses, times, stored, held = [], [], 0, 0
            with timed(ids.device) as whole:
                for last in recomputed(begin, end, every):
                    cache = wrapped.new_cache()
                    with timed(ids.device) as elapsed:
                        logits = wrapped.prefill(ids[:, max(0, last + 1 - window) : last + 1], cache=cache).logits
                    times.append(elapsed.seconds)
                    losses.append(_nll(logits, ids[:, last + 1 : last + 2]))
                    stored, held = cache.exact_nbytes, int(cache.seen.max())
            if losses:
                exact = stored // held * end
                ms = quartiles([seconds * 1000 for seconds in times])
                yield Bucket(index, torch.cat(losses, 1), stored, exact, held, ms, whole.seconds)


def recomputed(begin: int, end: int, every: int) -> range:
    """The tokens from `begin` to `end` whose prediction is recomputed: the last of each `every`."""
    return range(begin + (-begin - 1) % every, end, every)


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood in nats of `targets` [B, T] under `logits` [B, T, V]."""
    return F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none").cpu()
