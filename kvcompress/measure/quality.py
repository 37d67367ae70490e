"""Perplexity, KL and memory of methods on one text, all against the exact prefix in the same process."""

from __future__ import annotations

import gc
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from kvcompress.cache import CompressedCache
from kvcompress.decoder import evaluating
from kvcompress.inputs import check_ids
from kvcompress.kernels.choose import library
from kvcompress.measure.prefilled import Prefilled, alone, can_share, from_shared, prefill
from kvcompress.measure.record import Record, digest
from kvcompress.measure.scoring import Scores, ask, divergence, fill, score
from kvcompress.measure.trained import warn_past_trained
from kvcompress.methods.base import Method
from kvcompress.methods.exact import Exact
from kvcompress.text_form import MethodError, parse
from kvcompress.wrapping import wrap

if TYPE_CHECKING:
    from kvcompress.prefix.prefix_cache import PrefixCache


@dataclass
class Details:
    """What a record has no room for: KL(exact || method) in nats of each scored token [T], and what was kept.

    `kept` holds, layer by layer, the positions [H, S] kept after prefill and compression, -1 in empty slots.
    """

    kl: Tensor
    kept: list[Tensor]


def evaluate(
    model: PreTrainedModel,
    ids: Tensor,
    methods: Sequence[Method | str] | Method | str,
    prefix: int,
    scored: int,
    question: Tensor | Sequence[Tensor] | None = None,
    *,
    chunk: int | None = None,
    share_prefill: bool = True,
    seed: int | None = None,
    name: str | None = None,
    first_sample: int = 0,
    on_error: str = "raise",
    prefix_cache: PrefixCache | None = None,
) -> list[Record]:
    """Measures each method on each row of `ids` [samples, at least prefix + scored + 1] against the exact baseline.

    The first `prefix` ids are prefilled and compressed; a question, if given, is fed after that; then the next
    `scored` ids are fed, each predicting the one after it. Only these predictions count: the one right after prefill
    saw everything. `question` is [T] for all samples, or one for each: [samples, T] or a list of tensors. Question and
    scored ids are decoded as `generate` and tasks do: token by token under a method that acts on every call.

    With `share_prefill` the prompt is prefilled once and each method starts from a fork of it. `on_error="record"`
    makes a failed method a record with status "failed" instead of raising; without the exact baseline all of them
    failed. With a `prefix_cache`, prefills begin with the KV of former samples that share their beginning;
    `tokens_reused` says how much, and `prefill_s` is then the time of the rest. A model in train mode is measured in
    eval mode, with a warning, and left as it was; a text longer than the model was trained for warns too.

    Raises ValueError for too few ids, for ids outside the vocabulary and for questions that are not one for each
    sample, MethodError for a wrong method.
    """
    several = [methods] if isinstance(methods, str | Method) else methods
    parsed = [parse(method) for method in several]
    if not parsed:
        raise MethodError("there is no method to measure; give at least one, such as 'exact'")
    rows = ids[None] if isinstance(ids, Tensor) and ids.dim() == 1 else ids
    _check_ids(model, rows, prefix, scored)
    questions = _questions(question, len(rows))
    for each in questions:
        if each is not None and each.numel():
            check_ids(each, _vocabulary(model))
    asked = max(0 if each is None else each.numel() for each in questions)
    warn_past_trained(model.config, *fed(prefix, asked, scored))
    records: list[Record] = []
    for sample, (row, asked) in enumerate(zip(rows, questions, strict=True), start=first_sample):
        records += evaluate_sample(
            model,
            row,
            parsed,
            prefix,
            scored,
            asked,
            chunk=chunk,
            share_prefill=share_prefill,
            seed=seed,
            name=name,
            sample=sample,
            on_error=on_error,
            prefix_cache=prefix_cache,
        )
    return records


def fed(prefix: int, question: int, scored: int) -> tuple[int, str]:
    """How many tokens a sample feeds, and of what they are made in words."""
    parts = [f"prefix {prefix}", *([f"question {question}"] if question else []), f"scored {scored}"]
    return prefix + question + scored, " + ".join(parts)


def _questions(question: Tensor | Sequence[Tensor] | None, samples: int) -> list[Tensor | None]:
    """The question [1, T] of each sample."""
    if question is None:
        return [None] * samples
    if isinstance(question, Tensor) and question.dim() == 1:
        return [question[None]] * samples
    several = [each.reshape(1, -1) for each in question]
    if len(several) == 1:
        return [several[0]] * samples
    if len(several) != samples:
        raise ValueError(
            f"{len(several)} questions for {samples} samples; give one [T] for all, or as many as there are samples"
        )
    return [*several]


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
    settings: dict[str, Any] | None = None,
    config_hash: Callable[[Method], str] | None = None,
    sample: int = 0,
    on_error: str = "raise",
    prefix_cache: PrefixCache | None = None,
    on_details: Callable[[Record, Details], None] | None = None,
) -> Iterator[Record]:
    """`evaluate` for one text [N], a record at a time as each is measured; `on_details` is told of each before it.

    `settings` goes into the records as what else they depend on, and `config_hash` gives the hash of each method's;
    by default they tell of the arguments and the model.
    """
    _check_ids(model, ids[None], prefix, scored)
    if on_error not in ("raise", "record"):
        raise ValueError(f'on_error must be "raise" or "record", got {on_error!r}')
    device = model.device
    ids = ids.to(device)
    prompt, feed = ids[None, :prefix], ids[None, prefix : prefix + scored]
    targets = ids[prefix + 1 : prefix + scored + 1]
    asked = None if question is None else question.to(device).reshape(1, -1)
    data_hash = _hash(ids[: prefix + scored + 1])

    def new_record(method: Method) -> Record:
        about = [settings, str(device), prefix, scored, seed, data_hash]
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
            settings=settings,
            config_hash=digest([str(method), *about]) if config_hash is None else config_hash(method),
            kernels=library(device.type),
        )

    def failed(method: Method, error: Exception, what: str = "") -> Record:
        record = new_record(method)
        record.status, record.error = "failed", f"{what}{type(error).__name__}: {error}".splitlines()[0][:500]
        return record

    def measured(method: Method, run: Callable[[], tuple[Prefilled, Scores]], exact: Scores) -> Record:
        record = new_record(method)
        try:
            prefilled, scores = run()
            kl = divergence(exact.log_probabilities, scores.log_probabilities)
            fill(record, prefilled, scores, exact, targets, kl)
            if on_details is not None:
                on_details(record, Details(kl, prefilled.kept))
        except Exception as error:
            if on_error == "raise":
                raise
            record = failed(method, error)
            del error  # its traceback holds the caches in a cycle
            gc.collect()
        return record

    with _in_eval_mode(model):
        with wrap(model, Exact(), prefix_cache) as wrapped:
            if settings is None:
                shown = None if asked is None else _hash(asked)
                settings = {"weights": wrapped.identity[:16], "question": shown, "chunk": chunk}
                settings |= {"share_prefill": share_prefill, "prefix_cache": prefix_cache is not None}
            sharing = [method for method in methods if share_prefill and can_share(wrapped, method, prefix, chunk)]
            try:
                gathered, seconds, _ = prefill(wrapped, prompt, chunk, sharing)
                ready = gathered.compress_as(Exact())  # gathering for others would slow its steps down
                ask(wrapped, ready, asked)
                exact = score(wrapped, ready.fork(), feed, ready)
            except Exception as error:
                if on_error == "raise":
                    raise
                yield from [failed(method, error, "exact baseline: ") for method in methods]
                return

            def run_shared(gathered: CompressedCache, method: Method) -> tuple[Prefilled, Scores]:
                prefilled = from_shared(wrapped, gathered, method, seconds)
                ask(wrapped, prefilled.cache, asked)
                return prefilled, score(wrapped, prefilled.cache, feed, ready)

            for method in sharing:
                yield measured(method, partial(run_shared, gathered, method), exact)
            del gathered  # what was gathered is not needed by the methods that run alone

        def run_alone(method: Method) -> tuple[Prefilled, Scores]:
            with wrap(model, method, prefix_cache) as own:
                prefilled = alone(own, prompt, chunk)
                ask(own, prefilled.cache, asked)
                return prefilled, score(own, prefilled.cache, feed, ready)

        for method in methods:
            if method not in sharing:
                yield measured(method, partial(run_alone, method), exact)


@contextmanager
def _in_eval_mode(model: PreTrainedModel) -> Iterator[None]:
    if any(module.training for module in model.modules()):
        warnings.warn(
            "the model, or a part of it, is in train mode: it is measured in eval mode, without dropout, and left as "
            "it was",
            stacklevel=2,
        )
    with evaluating(model):
        yield


def _check_ids(model: PreTrainedModel, rows: Tensor, prefix: int, scored: int) -> None:
    for option, value in (("prefix", prefix), ("scored", scored)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{option} must be an integer of at least 1, got {value!r}")
    needed = prefix + scored + 1
    check_ids(rows[..., :needed] if isinstance(rows, Tensor) else rows, _vocabulary(model))
    if rows.shape[-1] < needed:
        raise ValueError(
            f"{rows.shape[-1]} ids are too few: prefix {prefix} + scored {scored} + 1 = {needed} are needed; "
            "give a longer text or lower one of them"
        )


def _vocabulary(model: PreTrainedModel) -> int | None:
    return getattr(model.get_input_embeddings(), "num_embeddings", None)


def _hash(ids: Tensor) -> str:
    return hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()[:16]
