"""Generation behind a compressed prompt: the end of each context is decoded, then `generate` goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from lm_eval.api.instance import Instance
from torch import Tensor
from transformers import LogitsProcessor

from kvcompress.cache import CompressedCache
from kvcompress.evals.stored import StoredKV, stored_kv
from kvcompress.measure.decoding import columns_per_call
from kvcompress.measure.stored import compressed_rows
from kvcompress.wrapping import Wrapped


class CompressionWatch(LogitsProcessor):
    """Notes which rows had something evicted or packed before a call of `generate`, the prefill apart.

    It changes no score: `generate` calls it once a token, when that token's call is over.
    """

    def __init__(self, cache: CompressedCache, rows: int) -> None:
        self.cache = cache
        self.compressed = [False] * rows
        self._before_call = compressed_rows(cache) or self.compressed

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.compressed = [old or new for old, new in zip(self.compressed, self._before_call, strict=True)]
        self._before_call = compressed_rows(self.cache)
        return scores


def prefill_and_feed(
    wrapped: Wrapped, ids: Tensor, mask: Tensor, tail: int, chunk: int | None
) -> tuple[CompressedCache, list[StoredKV]]:
    """A cache of left-padded contexts [B, W], their last `tail` tokens decoded, the very last left for `generate`.

    Beside it, what each row stored when it was compressed. `tail` must leave every row a token to prefill.
    """
    end = ids.shape[1] - tail
    cache = wrapped.new_cache()
    wrapped.prefill(ids[:, :end], mask[:, :end], cache, chunk)
    stored = stored_kv(cache)
    step = columns_per_call(cache)
    for start in range(end, ids.shape[1] - 1, step):
        wrapped(ids[:, start : min(start + step, ids.shape[1] - 1)], cache=cache)
    return cache, stored


@contextmanager
def as_decoding(wrapped: Wrapped) -> Iterator[None]:
    """While `generate` goes on from a filled cache, its first call is decoding and no further prompt.

    A further prompt would make prefill methods choose again, and so compress what a query-agnostic task asks after
    compression.
    """
    model: Any = wrapped.model
    as_prompt = model._prefill
    model._prefill = MethodType(type(model)._prefill, model)
    try:
        yield
    finally:
        model._prefill = as_prompt


@dataclass(frozen=True)
class Prompt:
    """A `generate_until` request of lm-eval in tokens.

    The last `tail` of `ids` are decoded behind the compressed rest; at most `room` are generated, under `options`.
    `repeat` counts those that were asked for the same before.
    """

    request: Instance
    text: str
    ids: tuple[int, ...]
    tail: int
    room: int
    options: str
    repeat: int = 0


@dataclass(frozen=True)
class Written:
    """The text generated for a prompt, what its row stored after compression, and whether it met such a cache."""

    text: str
    stored: StoredKV
    compressed: bool


@dataclass(frozen=True)
class Generated:
    """One row: its ids, the context included, what it stored after compression, and whether it met such a cache."""

    ids: Tensor
    stored: StoredKV
    compressed: bool


def generate_behind(
    wrapped: Wrapped,
    generate: Callable[..., Tensor],
    contexts: Tensor,
    mask: Tensor,
    tail: int,
    chunk: int | None = None,
    copies: int = 1,
) -> list[Generated]:
    """What `generate(contexts, skipped, attention_mask=…, …)` writes behind left-padded contexts [B, W].

    The last `tail` tokens of a context are decoded behind the compressed rest, or as many as leave it one token;
    rows that differ in that are generated apart. `skipped` columns of padding were cut off. `copies` is how many
    rows `generate` makes of one, as for beams. What a context of one token stores is read at the end.
    """
    counts = mask.sum(-1).tolist()
    by_tail: dict[int, list[int]] = {}
    for row, count in enumerate(counts):
        by_tail.setdefault(min(tail, count - 1), []).append(row)
    results: dict[int, Generated] = {}
    for length, rows in by_tail.items():
        skipped = contexts.shape[1] - max(counts[row] for row in rows)
        ids, own_mask = contexts[rows, skipped:], mask[rows, skipped:]
        stored: list[StoredKV] = []
        cache = wrapped.new_cache()
        going_on: AbstractContextManager[None] = nullcontext()
        if length:
            cache, stored = prefill_and_feed(wrapped, ids, own_mask, length, chunk)
            cache = cache if copies == 1 else cache.fork(copies)
            going_on = as_decoding(wrapped)
        watch = CompressionWatch(cache, len(ids) * copies)
        options = {"attention_mask": own_mask, "logits_processor": [watch], wrapped.cache_name: cache}
        with going_on:
            output = generate(ids, skipped, **options)
        stored = stored or stored_kv(cache)[::copies]
        for place, row in enumerate(rows):
            whole = torch.cat([contexts[row, :skipped], output[place]])
            results[row] = Generated(whole, stored[place], watch.compressed[place * copies])
    return [results[row] for row in range(len(counts))]
