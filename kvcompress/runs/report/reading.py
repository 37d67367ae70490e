"""Reads results folders for a report, and says what was left out and why."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from kvcompress.evals.results import EvalResult
from kvcompress.measure.record import JsonLine, Record
from kvcompress.measure.streaming import StreamRecord
from kvcompress.runs.config import ConfigError, RunConfig, StreamingConfig, read_config
from kvcompress.runs.details import StoredDetails, read_details


class ReportError(ValueError):
    """There is nothing to report on."""


@dataclass
class TaskResult:
    """One task under one method, and of each document id where its answer stood: (depth, length)."""

    result: EvalResult
    family: str | None
    places: dict[int, tuple[float, int]]


@dataclass
class Results:
    """What all folders hold. `skipped` names what was left out and why, one sentence each."""

    folders: list[Path]
    records: list[Record] = field(default_factory=list)
    streams: list[StreamRecord] = field(default_factory=list)
    tasks: list[TaskResult] = field(default_factory=list)
    configs: dict[Path, RunConfig | StreamingConfig] = field(default_factory=dict)
    details: dict[tuple[str, int], StoredDetails] = field(default_factory=dict)
    hashes: dict[Path, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


def read_results(folders: Sequence[Path]) -> Results:
    """Everything readable in `folders`. Raises ReportError for a folder that is not there, and if all hold nothing."""
    results = Results(list(dict.fromkeys(folders)))
    for folder in results.folders:
        if not folder.is_dir():
            raise ReportError(f"{folder}: there is no such folder; give results folders of `kvcompress run` or `eval`")
        _read_config(folder, results)
        _read_records(folder, results)
        _read_streams(folder, results)
        _read_tasks(folder, results)
    results.records = _once(results.records, lambda record: record.key)
    results.streams = _once(results.streams, lambda record: record.key)
    results.tasks = _once(results.tasks, lambda task: task.result.key)
    if not (results.records or results.streams or results.tasks):
        names = ", ".join(str(folder) for folder in results.folders)
        reasons = "".join(f"\n  skipped {reason}" for reason in results.skipped)
        raise ReportError(
            f"{names}: no results there; expected records.jsonl, streaming.jsonl or results/*.json, as "
            f"`kvcompress run` and `kvcompress eval` write them{reasons}"
        )
    return results


T = TypeVar("T")
L = TypeVar("L", bound=JsonLine)


def _once(items: list[T], key: Callable[[T], Any]) -> list[T]:
    """The last of each key: what was measured again, or lies in two folders, counts once."""
    return list({key(item): item for item in items}.values())


def _read_config(folder: Path, results: Results) -> None:
    path = folder / "config.yaml"
    if not path.exists():
        return
    try:
        results.configs[folder] = read_config(path)
        _hash(path, results)
    except ConfigError as error:
        results.skipped.append(str(error))


def _read_records(folder: Path, results: Results) -> None:
    config = results.configs.get(folder)
    others: Counter[str] = Counter()
    for record in _lines(folder / "records.jsonl", Record, record_fault, results):
        other = _other_setting(record, config)
        if other:
            others[other] += 1
            continue
        results.records.append(record)
        try:
            details = read_details(folder, *record.key)
            if details is not None:
                results.details[record.key] = details
        except ValueError as error:
            results.skipped.append(f"{folder / 'details'}: {error}")
    for other, count in others.items():
        results.skipped.append(
            f"{folder / 'records.jsonl'}: {count} records of another setting than config.yaml: {other}"
        )


def _read_streams(folder: Path, results: Results) -> None:
    results.streams += _lines(folder / "streaming.jsonl", StreamRecord, stream_fault, results)


def _other_setting(record: Record, config: RunConfig | StreamingConfig | None) -> str:
    """How a record differs from the config beside it; empty if it does not."""
    if not isinstance(config, RunConfig):
        return ""
    pairs = (
        ("model", record.model, config.model),
        ("dtype", record.dtype, config.dtype),
        ("prefix", record.tokens_prefix, config.prefix),
        ("scored", record.tokens_scored, config.scored),
    )
    return ", ".join(f"{name} {mine} instead of {theirs}" for name, mine, theirs in pairs if mine != theirs)


def _lines(path: Path, kind: type[L], fault: Callable[[L], str], results: Results) -> list[L]:
    """The sound records of a file; the reasons against the others go into `results.skipped`."""
    if not path.exists():
        return []
    content = path.read_bytes()
    _hash(path, results)
    found = []
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = kind.from_json(line.decode())
            reason = other_version(getattr(record, "versions", {})) or fault(record)
        except ValueError as error:
            cut = number == len(lines)  # every whole record ends its line
            record, reason = None, "half-written: the run was stopped here" if cut else str(error)
        if record is not None and not reason:
            found.append(record)
        else:
            results.skipped.append(f"{path}, line {number}: {reason}")
    return found


def other_version(versions: dict[str, str]) -> str:
    """Why results of these versions cannot stand beside today's; empty if they can.

    Numbers of one minor version are comparable.
    """
    mine, theirs = version("kvcompress"), versions.get("kvcompress", "an unknown version")
    if theirs.split(".")[:2] == mine.split(".")[:2]:
        return ""
    return f"measured by kvcompress {theirs}, this is {mine}: measure it again, or report with that version"


def record_fault(record: Record) -> str:
    """What in a record contradicts itself, as it does after an edit; empty if nothing does."""
    if record.status != "ok":
        return ""
    if None in (record.nll, record.ppl, record.kl, record.kv_bytes, record.kv_bytes_exact, record.memory_ratio):
        return "its status is ok, but a number is missing"
    assert record.nll is not None and record.ppl is not None and record.memory_ratio is not None
    assert record.kv_bytes is not None and record.kv_bytes_exact is not None
    if record.kv_bytes <= 0 or not math.isclose(
        record.memory_ratio, record.kv_bytes_exact / record.kv_bytes, rel_tol=1e-6
    ):
        return f"edited: memory_ratio {record.memory_ratio} is not {record.kv_bytes_exact} / {record.kv_bytes} bytes"
    return _perplexity_fault(record.nll, record.ppl)


def stream_fault(record: StreamRecord) -> str:
    """The same for a bucket of a streaming run."""
    if record.status != "ok":
        return ""
    if record.nll is None or record.ppl is None or record.kv_bytes is None:
        return "its status is ok, but a number is missing"
    return _perplexity_fault(record.nll, record.ppl)


def _perplexity_fault(nll: float, ppl: float) -> str:
    expected = math.exp(min(nll, 700.0))
    if math.isclose(ppl, expected, rel_tol=1e-6):
        return ""
    return f"edited: ppl {ppl:.6g} is not exp of nll {nll:.6g}, {expected:.6g}"


def _read_tasks(folder: Path, results: Results) -> None:
    for path in sorted(folder.glob("results/*.json")):
        try:
            result = EvalResult.from_json(path.read_text(encoding="utf-8"))
            reason = other_version(result.versions)
        except (ValueError, OSError) as error:
            result, reason = None, str(error)
        if result is None or reason:
            results.skipped.append(f"{path}: {reason}")
            continue
        _hash(path, results)
        results.tasks.append(TaskResult(result, *_places(folder / "lm_eval" / path.name, results)))


def _places(path: Path, results: Results) -> tuple[str | None, dict[int, tuple[float, int]]]:
    """The family of a generated task and where the answer of each document stood, from lm-eval's own results."""
    if not path.exists():
        return None, {}
    try:
        (samples,) = json.loads(path.read_text(encoding="utf-8"))["samples"].values()
        documents = {sample["doc_id"]: sample["doc"] for sample in samples}
        places = {
            number: (float(document["depth"]), int(document["target_length"]))
            for number, document in documents.items()
            if document.get("depth") is not None and "target_length" in document
        }
        return next((document["family"] for document in documents.values() if "family" in document), None), places
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        results.skipped.append(f"{path}: not lm-eval's results ({type(error).__name__}: {error}); no heat map of it")
        return None, {}


def _hash(path: Path, results: Results) -> None:
    results.hashes[path] = hashlib.sha256(path.read_bytes()).hexdigest()
