"""Results of evaluations on disk: one JSON file for each task under each method, with lm-eval's own beside it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvcompress.evals.answer_file import AnswerFile
from kvcompress.measure.record import digest, versions
from kvcompress.runs.records import only_writer, write_whole


def all_versions() -> dict[str, str]:
    """The versions that a score depends on."""
    return {**versions(), "lm_eval": version("lm_eval")}


@dataclass
class SampleResult:
    """One document: its score under the result's metric, mean stored bytes, and whether it met a compressed cache.

    `score` is null where the metric gives no number a document; bytes are null where nothing was measured.
    """

    doc_id: int
    score: float | None
    kv_bytes: float | None
    kv_bytes_exact: float | None
    kv_bytes_exact_16bit: float | None
    compressed: bool


@dataclass
class EvalResult:
    """One task under one method.

    `score` and `stderr` are those of `metric` as lm-eval computes them, `scores` holds all its metrics.
    `sample_score` says what `SampleResult.score` is where it is not the metric itself. Bytes are a sample's mean,
    spare apart. `compressed` counts the samples of which a token was evicted or packed when they were scored.
    `reused` answers are those of an earlier run that was stopped; `seconds` is null then. `kernels` is what the others
    were computed with, as in a `Record`.
    """

    key: str
    model: str
    fingerprint: str
    task: str
    task_version: str
    method: str
    num_fewshot: int
    limit: float | None
    seed: int
    data_hash: str
    settings: dict[str, Any]
    query_aware: bool | None = None
    metric: str | None = None
    higher_is_better: bool | None = None
    score: float | None = None
    stderr: float | None = None
    scores: dict[str, Any] = field(default_factory=dict)
    sample_score: str | None = None
    samples: list[SampleResult] = field(default_factory=list)
    compressed: int = 0
    truncated: int = 0
    reused: int = 0
    kv_bytes: float | None = None
    kv_bytes_exact: float | None = None
    memory_ratio: float | None = None
    memory_ratio_16bit: float | None = None
    seconds: float | None = None
    kernels: str | None = None
    versions: dict[str, str] = field(default_factory=all_versions)
    status: str = "ok"
    error: str | None = None

    def to_json(self) -> str:
        """Indented JSON without NaN, with a checksum that tells an edited file."""
        content = finite(asdict(self))
        return json.dumps({**content, "checksum": digest(content)}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> EvalResult:
        """The result in `text`. Raises ValueError for what is none, is half, or was edited."""
        content = json.loads(text)
        if not isinstance(content, dict) or content.pop("checksum", None) != digest(content):
            raise ValueError("the checksum is missing or does not fit the content")
        unknown = set(content) - {each.name for each in fields(cls)}
        if unknown:
            raise ValueError(f"it comes from another version: {sorted(unknown)[0]!r} is not known here")
        try:
            result = cls(**content)
            result.samples = [SampleResult(**sample) for sample in content["samples"]]
        except (TypeError, KeyError) as error:
            raise ValueError(f"it is no whole result ({error})") from None
        return result


class ResultsFolder:
    """`results/` and `lm_eval/` of a folder, a file for each key in both, and the `answers` of unfinished ones, too.

    `refused` says what could not be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.answers = AnswerFile(folder)
        self.refused: list[str] = []

    @contextmanager
    def opened(self) -> Iterator[ResultsFolder]:
        """Holds the folder for one writer. Raises RecordsError if it cannot be written or another run is in it."""
        with only_writer(self.folder, "results", "lm_eval"):
            self.answers.go_on()
            if self.answers.dropped:
                numbers = ", ".join(map(str, self.answers.dropped))
                self.refused.append(f"{self.answers.path.name}: no whole answers in line {numbers}; computed again")
            yield self

    def find(self, key: str) -> EvalResult | None:
        """The finished result of that key; None for one that is half-written, edited or of another version, too."""
        for path in self.folder.glob(f"results/*-{key}.json"):
            try:
                result = EvalResult.from_json(path.read_text(encoding="utf-8"))
                if result.key != key:
                    raise ValueError(f"its key is {result.key}")
            except (ValueError, OSError) as error:
                self.refused.append(f"{path.name}: {error}; measured again")
                continue
            return result if result.status == "ok" else None
        return None

    def write(self, result: EvalResult, lm_eval_results: dict[str, Any] | None) -> None:
        """Writes a result through, and lm-eval's own results beside it. Raises RecordsError if the disk refuses."""
        name = f"{result.task}-{_file_name(result.method)}-{result.key}.json"
        if lm_eval_results is not None:
            from lm_eval.utils import handle_non_serializable

            text = json.dumps(lm_eval_results, indent=1, default=handle_non_serializable, ensure_ascii=False)
            write_whole(self.folder / "lm_eval" / name, text)
        write_whole(self.folder / "results" / name, result.to_json())


def finite(value: Any) -> Any:
    """`value` with null in place of every number that JSON cannot hold."""
    if isinstance(value, dict):
        return {str(name): finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _file_name(method: str) -> str:
    return re.sub(r"[^a-zA-Z0-9._]+", "_", method).strip("_")[:80]
