"""Perplexity, KL and memory of methods on one text, all against the exact prefix in the same process."""

from __future__ import annotations

import gc
import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcompress.cache import CompressedCache
from kvcompress.measure.memory import Peak, peak_memory
from kvcompress.measure.record import Record, digest
from kvcompress.measure.speed import timed
from kvcompress.methods.base import Method
from kvcompress.methods.exact import Exact
from kvcompress.text_form import parse
from kvcompress.wrapping import Wrapped, wrap

if TYPE_CHECKING:
    from kvcompress.prefix.prefix_cache import PrefixCache

TIMED_TOKENS = 32


@dataclass
class Scores:
    """What the scored tokens gave: log-probabilities [T, V] fp32, and the median time of one single-token call."""

    log_probabilities: Tensor
    ms_per_token: float
    kv_bytes_end: int


@dataclass
class Details:
    """What a record has no room for: KL(exact || method) in nats of each scored token [T], and what was kept.

    `kept` holds, layer by layer, the positions [H, S] kept after prefill and compression, -1 in empty slots.
    """

    kl: Tensor
    kept: list[Tensor]


@dataclass
class Prefilled:
    """A compressed prefix, what it took, and what it stores (spare apart)."""

    cache: CompressedCache
    prefill_s: float
    compress_s: float | None
    shared: bool
    peak: Peak

    def __post_init__(self) -> None:
        cache = self.cache
        self.kv_bytes = _stored(cache)
        self.kv_bytes_exact = cache.exact_nbytes
        kept = [(layer, cache.kept(layer.index)) for layer in cache.layers if layer.shape is not None]
        self.kept_tokens = max(positions.shape[-1] for _, positions in kept)
        self.kept_values = sum(
            int((positions >= 0).sum()) * (layer.shape.key_dim + layer.shape.value_dim)
            for layer, positions in kept
            if layer.shape is not None
        )
        self.itemsize = max(layer.shape.itemsize for layer, _ in kept if layer.shape is not None)
        self.kept = [positions[0] for _, positions in kept]


def _stored(cache: CompressedCache) -> int:
    return cache.nbytes - cache.memory()["spare"]


def evaluate(
    model: PreTrainedModel,
    ids: Tensor,
    methods: Sequence[Method | str],
    prefix: int,
    scored: int,
    question: Tensor | None = None,
    *,
    chunk: int | None = None,
    share_prefill: bool = True,
    seed: int | None = None,
    name: str | None = None,
    config_hash: str | None = None,
    first_sample: int = 0,
    on_error: str = "raise",
    prefix_cache: PrefixCache | None = None,
) -> list[Record]:
    """Measures each method on each row of `ids` [samples, at least prefix + scored + 1] against the exact baseline.

    The first `prefix` ids are prefilled and compressed; `question` [T], if given, is fed after that; then the next
    `scored` ids are fed, each predicting the one after it. Only these predictions count: the one right after prefill
    saw everything. With `share_prefill` the prompt is prefilled once and each method starts from a fork of it.
    `on_error="record"` makes a failed method a record with status "failed" instead of raising. With a `prefix_cache`,
    prefills begin with the KV of former samples that share their beginning; `tokens_reused` says how much, and
    `prefill_s` is then the time of the rest.

    Raises ValueError for too few ids, MethodError for a wrong method.
    """
    parsed = [parse(method) for method in methods]
    rows = ids[None] if ids.dim() == 1 else ids
    _check_sizes(rows, prefix, scored)
    records: list[Record] = []
    for sample, row in enumerate(rows, start=first_sample):
        records += list(
            evaluate_sample(
                model,
                row,
                parsed,
                prefix,
                scored,
                question,
                chunk=chunk,
                share_prefill=share_prefill,
                seed=seed,
                name=name,
                config_hash=config_hash,
                sample=sample,
                on_error=on_error,
                prefix_cache=prefix_cache,
            )
        )
    return records


def evaluate_sample(
    model: PreTrainedModel,
    ids: Tensor,
    methods: Sequence[Method],
    prefix: int,
    scored: int,
    question: Tensor | None = None,
    *,
    chunk: int | None = None,
    share_prefill: bool = True,
    seed: int | None = None,
    name: str | None = None,
    config_hash: str | None = None,
    sample: int = 0,
    on_error: str = "raise",
    prefix_cache: PrefixCache | None = None,
    on_details: Callable[[Record, Details], None] | None = None,
) -> Iterator[Record]:
    """`evaluate` for one text [N], a record at a time as each is measured; `on_details` is told of each before it."""
    _check_sizes(ids[None], prefix, scored)
    if on_error not in ("raise", "record"):
        raise ValueError(f'on_error must be "raise" or "record", got {on_error!r}')
    device = model.device
    ids = ids.to(device)
    feed = ids[None, prefix : prefix + scored]
    targets = ids[prefix + 1 : prefix + scored + 1]
    asked = None if question is None else question.to(device).reshape(1, -1)
    data_hash = hashlib.sha256(ids[: prefix + scored + 1].cpu().numpy().tobytes()).hexdigest()[:16]
    prompt = ids[None, :prefix]

    def new_record(method: Method) -> Record:
        return Record(
            method=str(method),
            model=name or getattr(model.config, "name_or_path", "") or type(model).__name__,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(device),
            sample=sample,
            data_hash=data_hash,
            tokens_prefix=prefix,
            tokens_scored=scored,
            query_aware=None if question is None else False,
            seed=seed,
            config_hash=config_hash or digest([str(method), prefix, scored, chunk, data_hash]),
        )

    def measured(method: Method, run: Callable[[], tuple[Prefilled, Scores]], exact: Scores) -> Record:
        record = new_record(method)
        try:
            prefilled, scores = run()
            kl = _kl(exact.log_probabilities, scores.log_probabilities)
            _fill(record, prefilled, scores, exact, targets, kl)
            if on_details is not None:
                on_details(record, Details(kl, prefilled.kept))
        except Exception as error:
            if on_error == "raise":
                raise
            record.status, record.error = "failed", f"{type(error).__name__}: {error}".splitlines()[0][:500]
        gc.collect()
        return record

    with wrap(model, Exact(), prefix_cache) as wrapped:
        sharing = [method for method in methods if share_prefill and _can_share(wrapped, method, prefix, chunk)]
        gathered, seconds, _ = _prefill(wrapped, prompt, chunk, sharing)
        exact = _score(wrapped, gathered.fork(), asked, feed, one_call=True)

        for method in sharing:
            run = partial(_from_shared, wrapped, gathered, method, seconds, asked, feed)
            yield measured(method, run, exact)
        gathered = None  # its memory is not needed by the methods that run alone
    for method in methods:
        if method not in sharing:
            with wrap(model, method, prefix_cache) as own:
                yield measured(method, partial(_alone, own, prompt, chunk, asked, feed), exact)


def _check_sizes(rows: Tensor, prefix: int, scored: int) -> None:
    for option, value in (("prefix", prefix), ("scored", scored)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{option} must be an integer of at least 1, got {value!r}")
    needed = prefix + scored + 1
    if rows.shape[-1] < needed:
        raise ValueError(
            f"{rows.shape[-1]} ids are too few: prefix {prefix} + scored {scored} + 1 = {needed} are needed; "
            "give a longer text or lower one of them"
        )


def _can_share(wrapped: Wrapped, method: Method, prefix: int, chunk: int | None) -> bool:
    """Whether one prefill in a single call serves this method as its own would."""
    trained = getattr(wrapped.model.config.get_text_config(), "max_position_embeddings", None)
    past_trained = method.position_mode == "cache" and trained is not None and prefix > trained
    return chunk is None and not past_trained


def _prefill(
    wrapped: Wrapped, prompt: Tensor, chunk: int | None, sharing: Iterable[Method]
) -> tuple[CompressedCache, float, Peak]:
    cache = wrapped.new_cache(gather_for=tuple(sharing)) if isinstance(wrapped.method, Exact) else wrapped.new_cache()
    device = prompt.device
    with peak_memory(device) as peak, timed(device) as elapsed:
        wrapped.prefill(prompt, cache=cache, chunk=chunk)
    return cache, elapsed.seconds, peak


def _from_shared(
    wrapped: Wrapped,
    gathered: CompressedCache,
    method: Method,
    prefill_s: float,
    asked: Tensor | None,
    feed: Tensor,
) -> tuple[Prefilled, Scores]:
    """The method's own cache, from what the shared prefill gathered."""
    rotaries = wrapped.rotaries() if method.position_mode == "cache" else None
    with timed(wrapped.model.device) as elapsed:
        cache = gathered.compress_as(method, rotaries)
    prefilled = Prefilled(cache, prefill_s, elapsed.seconds, shared=True, peak=Peak())
    return prefilled, _score(wrapped, cache, asked, feed, one_call=not method.every_call)


def _alone(
    wrapped: Wrapped, prompt: Tensor, chunk: int | None, asked: Tensor | None, feed: Tensor
) -> tuple[Prefilled, Scores]:
    """A prefill of its own, for methods that cannot start from the shared one."""
    cache, seconds, peak = _prefill(wrapped, prompt, chunk, ())
    prefilled = Prefilled(cache, seconds, None, shared=False, peak=peak)
    return prefilled, _score(wrapped, cache, asked, feed, one_call=not wrapped.method.every_call)


def _score(wrapped: Wrapped, cache: CompressedCache, asked: Tensor | None, feed: Tensor, one_call: bool) -> Scores:
    """Feeds the question, then the scored ids: in one call where that changes nothing, else one by one.

    Times come from single-token calls in either case.
    """
    device = feed.device
    if asked is not None and asked.shape[1]:
        wrapped(asked, cache=cache)
    times: list[float] = []

    def step(over: CompressedCache, column: int) -> Tensor:
        with timed(device) as elapsed:
            logits = wrapped(feed[:, column : column + 1], cache=over).logits
        times.append(elapsed.seconds)
        return logits

    if one_call:
        trial = cache.fork()
        for column in range(min(TIMED_TOKENS, feed.shape[1])):
            step(trial, column)
        del trial
        logits = wrapped(feed, cache=cache).logits
    else:
        logits = torch.cat([step(cache, column) for column in range(feed.shape[1])], 1)
    return Scores(logits[0].float().log_softmax(-1), statistics.median(times) * 1000, _stored(cache))


def _fill(record: Record, prefilled: Prefilled, scores: Scores, exact: Scores, targets: Tensor, kl: Tensor) -> None:
    """Puts the measured numbers into `record`."""
    mine, theirs = scores.log_probabilities, exact.log_probabilities
    record.nll, record.nll_exact = _nll(mine, targets), _nll(theirs, targets)
    record.ppl, record.ppl_exact = math.exp(record.nll), math.exp(record.nll_exact)
    record.kl = float(kl.mean().clamp(min=0))
    record.top1_agreement = float((mine.argmax(-1) == theirs.argmax(-1)).float().mean())
    record.kv_bytes, record.kv_bytes_end = prefilled.kv_bytes, scores.kv_bytes_end
    record.kv_bytes_exact = prefilled.kv_bytes_exact
    record.memory_ratio = prefilled.kv_bytes_exact / prefilled.kv_bytes
    record.memory_ratio_16bit = record.memory_ratio * 2 / prefilled.itemsize
    record.bits_per_value = prefilled.kv_bytes * 8 / prefilled.kept_values
    record.kept_tokens = prefilled.kept_tokens
    record.decode_ms_per_token, record.decode_ms_per_token_exact = scores.ms_per_token, exact.ms_per_token
    record.prefill_s, record.prefill_shared = prefilled.prefill_s, prefilled.shared
    record.compress_s, record.tokens_reused = prefilled.compress_s, prefilled.cache.reused_tokens
    record.peak_bytes, record.peak_of = prefilled.peak.nbytes, prefilled.peak.of


def _nll(log_probabilities: Tensor, targets: Tensor) -> float:
    """Mean negative log-likelihood of `targets` [T] in nats."""
    return float(-log_probabilities.gather(-1, targets[:, None]).mean())


def _kl(exact: Tensor, other: Tensor) -> Tensor:
    """KL(exact || other) in nats of each token [T], from log-probabilities [T, V]."""
    return (exact.exp() * (exact - other)).sum(-1)
