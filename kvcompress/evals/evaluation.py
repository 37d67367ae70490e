"""Runs each task under each method and keeps the results, skipping what an earlier run finished."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lm_eval.evaluator import evaluate

from kvcompress.evals.answers import Answers
from kvcompress.evals.model import CompressedLM, Use
from kvcompress.evals.results import EvalResult, ResultsFolder, SampleResult
from kvcompress.fingerprint import weights_fingerprint
from kvcompress.kernels.choose import library
from kvcompress.measure.record import digest
from kvcompress.runs.records import RecordsError

if TYPE_CHECKING:
    from lm_eval.api.task import Task

# What lm-eval scores these from are log-likelihoods, with or without a weight.
LIKELIHOOD_METRICS = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")

Progress = Callable[[str, str, EvalResult | None], None]
"""Told of the task, the method, and the result once there is one."""


@dataclass(frozen=True)
class Settings:
    """What a score depends on beside model, task and method. `limit` below 1 is a part of the documents.

    `fewshot_as_multiturn` makes each few-shot example a turn of the chat; None follows lm-eval, which does so wherever
    a chat template is applied. Raises ValueError for turns without a template.
    """

    num_fewshot: int | None = None
    limit: float | None = None
    seed: int = 0
    prefill_chunk: int | None = None
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.fewshot_as_multiturn is None:
            object.__setattr__(self, "fewshot_as_multiturn", self.apply_chat_template)
        elif self.fewshot_as_multiturn and not self.apply_chat_template:
            raise ValueError("fewshot_as_multiturn: turns need a chat template; add apply_chat_template")


def evaluate_all(
    models: Sequence[CompressedLM],
    tasks: dict[str, Task],
    settings: Settings,
    folder: ResultsFolder,
    name: str,
    progress: Progress = lambda task, method, result: None,
) -> list[EvalResult]:
    """The result of every task under every method, task by task; each is written as soon as it is there.

    What `folder` holds already is not run again, down to single answers of a task that was stopped. A task that fails
    under a method gives a result with status "failed" and its error, which the next run tries again.
    """
    for model in {id(lm.model): lm.model for lm in models}.values():
        weights_fingerprint(model)  # notices what no counter shows
    results = []
    for task_name, task in tasks.items():
        for lm in models:
            result = _empty_result(lm, task_name, task, settings, name)
            done = folder.find(result.key)
            if done is None:
                progress(task_name, str(lm.method), None)
                own = [settings.seed, result.versions["kvcompress"], result.versions["lm_eval"]]
                lm.answers = Answers(folder.answers, digest([lm.answers_fingerprint(), *own]))
                try:
                    folder.write(result, _run(lm, task, settings, result))
                finally:
                    lm.answers = Answers()
            results.append(done or result)
            progress(task_name, str(lm.method), results[-1])
    return results


def _empty_result(lm: CompressedLM, name: str, task: Task, settings: Settings, model: str) -> EvalResult:
    configured = task.get_config("num_fewshot")
    # As lm-eval does it: a task that says 0 never takes examples.
    shots = configured if configured == 0 or settings.num_fewshot is None else settings.num_fewshot
    docs = task.eval_docs
    count = len(docs)
    if settings.limit is not None:
        count = min(count, int(settings.limit) if settings.limit >= 1 else -int(-settings.limit * count // 1))
    documents = [dict(docs[index]) for index in range(count)]
    aware = {document.get("query_aware") for document in documents}
    result = EvalResult(
        key="",
        model=model,
        fingerprint=lm.wrapped.identity,
        task=name,
        task_version=str(task.VERSION),
        method=str(lm.method),
        num_fewshot=shots or 0,
        limit=settings.limit,
        seed=settings.seed,
        data_hash=digest(documents),
        settings={**asdict(settings), "max_length": lm.max_length},
        query_aware=aware.pop() if len(aware) == 1 else None,
        kernels=library(lm.device.type),
    )
    same = ("task", "task_version", "num_fewshot", "limit", "seed", "data_hash")
    relevant = {part: getattr(result, part) for part in same}
    relevant |= {"chat": settings.apply_chat_template, "turns": settings.fewshot_as_multiturn}
    relevant |= {"examples": [dict(document) for document in task.fewshot_docs()] if shots else []}
    result.key = digest([lm.answers_fingerprint(), relevant, result.versions["kvcompress"], result.versions["lm_eval"]])
    return result


def _run(lm: CompressedLM, task: Task, settings: Settings, result: EvalResult) -> dict[str, Any] | None:
    """Runs one task and fills `result`; lm-eval's own results, None where it failed."""
    lm.uses, lm.truncated = [], 0
    start, configured = time.perf_counter(), task.config.num_fewshot
    try:
        _prepare(task, settings, result.num_fewshot)
        tasks: Any = {"tasks": {result.task: task}, "groups": {}}
        # Not simple_evaluate, which looks over the whole machine again for every task.
        found: Any = evaluate(
            lm,
            tasks,
            limit=settings.limit,  # pyright: ignore[reportArgumentType]  # a part of the documents is allowed
            apply_chat_template=settings.apply_chat_template,
            fewshot_as_multiturn=bool(settings.fewshot_as_multiturn),
            bootstrap_iters=1000,
        )
        found["config"] = {"model": result.model, "model_args": {"method": result.method}, **result.settings}
        _fill(result, found, lm)
    except RecordsError:
        raise
    except Exception as error:
        result.status, result.error = "failed", f"{type(error).__name__}: {error}".strip().splitlines()[0][:500]
        found = None
    finally:
        task.config.num_fewshot = configured
    result.reused = lm.answers.found
    result.seconds = None if result.reused else time.perf_counter() - start
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def _prepare(task: Task, settings: Settings, num_fewshot: int) -> None:
    """Seeds everything and sets the few-shot examples, as lm-eval's simple_evaluate does."""
    random.seed(settings.seed)
    np.random.seed(settings.seed)
    torch.manual_seed(settings.seed)
    task.set_config(key="num_fewshot", value=num_fewshot)
    task.set_fewshot_seed(seed=settings.seed)


def _fill(result: EvalResult, found: dict[str, Any], lm: CompressedLM) -> None:
    (name,) = found["samples"]  # one task is run at a time
    scores = found["results"][name]
    result.scores = {metric: value for metric, value in scores.items() if "," in metric}
    main = next(metric for metric in result.scores if "_stderr," not in metric)
    metric, _, filter_name = main.partition(",")
    result.metric, result.score = metric, float(result.scores[main])
    stderr = result.scores.get(f"{metric}_stderr,{filter_name}")
    result.stderr = float(stderr) if isinstance(stderr, int | float) else None
    result.higher_is_better = found["higher_is_better"][name].get(metric)
    result.sample_score = "log-likelihood" if metric in LIKELIHOOD_METRICS else None
    uses: dict[int | None, list[Use]] = {}
    for use in lm.uses:
        uses.setdefault(use.doc_id, []).append(use)
    rows = [sample for sample in found["samples"][name] if sample["filter"] == filter_name]
    result.samples = [_sample(sample["doc_id"], sample.get(metric), uses.get(sample["doc_id"], [])) for sample in rows]
    measured = [sample for sample in result.samples if sample.kv_bytes]
    result.compressed = sum(sample.compressed for sample in result.samples)
    result.truncated = lm.truncated
    if measured:
        result.kv_bytes = _mean(sample.kv_bytes for sample in measured)
        result.kv_bytes_exact = _mean(sample.kv_bytes_exact for sample in measured)
        result.memory_ratio = result.kv_bytes_exact / result.kv_bytes
        result.memory_ratio_16bit = _mean(sample.kv_bytes_exact_16bit for sample in measured) / result.kv_bytes


def _sample(doc_id: int, value: Any, uses: list[Use]) -> SampleResult:
    if isinstance(value, tuple | list) and len(value) == 2 and value[1]:
        value = value[0] / value[1]  # a log-likelihood and its weight
    score = float(value) if isinstance(value, int | float) else None
    if not uses:
        return SampleResult(doc_id, score, None, None, None, False)
    return SampleResult(
        doc_id,
        score,
        _mean(use.stored.nbytes for use in uses),
        _mean(use.stored.exact_nbytes for use in uses),
        _mean(use.stored.exact_nbytes_16bit for use in uses),
        any(use.compressed for use in uses),
    )


def _mean(values: Iterable[float | None]) -> float:
    return fmean(value for value in values if value is not None)
