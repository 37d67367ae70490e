"""Results that differ in anything but their method stand apart, under titles that say in what they differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from kvcompress.evals.results import EvalResult
from kvcompress.measure.record import Record
from kvcompress.measure.streaming import StreamRecord

T = TypeVar("T")
K = TypeVar("K")
Facts = dict[str, Any]

HASHES = ("data_hash", "tokens_hash", "weights", "fingerprint")
"""What says that something differs, but not what: shown where nothing else tells all apart."""


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items of each key, in their order."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def alike(items: Iterable[T], title: Callable[[T], str], facts: Callable[[T], Facts]) -> dict[str, list[T]]:
    """The items of each set of facts, by title; equal titles are followed by the facts that tell them apart."""
    found: dict[str, list[T]] = {}
    by_facts = grouped(items, lambda item: _text(facts(item))).values()
    for same, groups in grouped(by_facts, lambda group: title(group[0])).items():
        each = [facts(group[0]) for group in groups]
        names = [name for name in dict.fromkeys(name for one in each for name in one) if len(_values(each, name)) > 1]
        said = [name for name in names if name not in HASHES]
        if len({_text([one.get(name, "unknown") for name in said]) for one in each}) == len(each):
            names = said
        for group, own in zip(groups, each, strict=True):
            found[", ".join([same, *(f"{_words(name)} {own.get(name, 'unknown')}" for name in names)])] = group
    return found


def record_title(record: Record) -> str:
    """The setting of a record in words."""
    question = "" if record.query_aware is None else ", a question after compression"
    return (
        f"{record.model}, {record.dtype} on {record.device}, prefix {record.tokens_prefix}, "
        f"{record.tokens_scored} scored{question}"
    )


def record_facts(record: Record) -> Facts:
    """All that the numbers of a record depend on beside its method and sample."""
    return {
        "model": record.model,
        "dtype": record.dtype,
        "device": record.device,
        "prefix": record.tokens_prefix,
        "scored": record.tokens_scored,
        "query_aware": record.query_aware,
        "seed": record.seed,
        "kernels": record.kernels,
        **(record.settings or {}),
    }


def stream_facts(line: StreamRecord) -> Facts:
    """The same for a bucket of a streaming run."""
    about = ("model", "dtype", "device", "data_hash", "segments", "seed", "kernels")
    return {**{name: getattr(line, name) for name in about}, **(line.settings or {})}


def task_title(result: EvalResult) -> str:
    """The setting of a task in words."""
    parts = [f"{result.task} with {result.model}"]
    if result.num_fewshot:
        parts.append(f"{result.num_fewshot}-shot")
    if result.query_aware is not None:
        parts.append("the question inside the compressed part" if result.query_aware else "the question after it")
    metadata = result.settings.get("metadata") or {}
    parts += [f"{name} {value}" for name, value in metadata.items() if name not in ("seed", "samples")]
    parts.append(f"seed {result.seed}")
    return ", ".join(parts)


def task_facts(result: EvalResult) -> Facts:
    """All that a task's score depends on beside the method."""
    settings = {name: value for name, value in result.settings.items() if name != "metadata"}
    metadata = {name: value for name, value in (result.settings.get("metadata") or {}).items() if name != "samples"}
    about = ("task", "model", "fingerprint", "task_version", "num_fewshot", "limit", "seed", "data_hash", "query_aware")
    own = {name: getattr(result, name) for name in (*about, "kernels")}
    return {**settings, **metadata, **own, "lm_eval": result.versions.get("lm_eval")}


def _values(facts: list[Facts], name: str) -> set[str]:
    return {_text(one.get(name, "unknown")) for one in facts}


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _words(name: str) -> str:
    return name.replace("_", " ")
