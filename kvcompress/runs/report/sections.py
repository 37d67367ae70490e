"""The sections of a report, from what the folders hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from kvcompress.evals.results import EvalResult
from kvcompress.measure.record import Record
from kvcompress.measure.statistics import PairedDifference
from kvcompress.measure.streaming import StreamRecord
from kvcompress.runs import streaming_summary, summary
from kvcompress.runs.report import figures
from kvcompress.runs.report.content import Cell, Figure, Section, Table
from kvcompress.runs.report.quality import Comparison, by_method, divergences, family, perplexities, task_scores
from kvcompress.runs.report.reading import Results, TaskResult
from kvcompress.runs.report.settings import (
    alike,
    grouped,
    record_facts,
    record_title,
    stream_facts,
    task_facts,
    task_title,
)

LENGTHS = ("task", "task_version", "length", "lengths", "data_hash")
"""Facts of a task in which the maps of one family may differ."""

MOST_DEPTHS = 10
"""Rows of a heat map; more depths are put together."""


def sections(results: Results) -> list[Section]:
    """All sections that there is something for, the making of the report apart."""
    methods = [record.method for record in results.records] + [task.result.method for task in results.tasks]
    families = list(dict.fromkeys(map(family, methods)))  # each has the same marker in all figures
    found = [
        _prefix_section(results.records, families),
        _task_section([task.result for task in results.tasks], families),
        _needle_section(results.tasks),
        _kept_section(results),
        _divergence_section(results),
        _time_section(results.records),
        _streaming_section(results.streams),
    ]
    return [section for section in found if section is not None]


def ranking(comparison: Comparison) -> str:
    """Which methods none beats in both, and which are not ranked and why."""
    if not comparison.points:
        return ""
    if not comparison.ranked:
        return f"{comparison.measure}: not ranked ({'; '.join(sorted(set(comparison.left_out.values())))})."
    front = sorted((point for point in comparison.points if point.on_front), key=lambda point: point.kv_bytes)
    unsure = [
        point.method
        for point in front
        if isinstance(point.difference, PairedDifference)
        and point.difference.verdict == "undecided"
        and point.method != "exact"
    ]
    text = f"{comparison.measure}: on the Pareto front are " + ", ".join(f"`{point.method}`" for point in front) + "."
    if unsure:
        text += " Not told apart from exact: " + ", ".join(f"`{method}`" for method in unsure) + "."
    if comparison.left_out:
        text += " Not ranked: " + ", ".join(f"`{method}` ({why})" for method, why in comparison.left_out.items()) + "."
    return text


def _prefix_section(records: Sequence[Record], families: Sequence[str]) -> Section | None:
    if not records:
        return None
    section = Section("Quality against stored bytes")
    for number, (title, group) in enumerate(alike(records, record_title, record_facts).items()):
        comparisons = [perplexities(group), divergences(group)]
        part = Section(title, [text for text in map(ranking, comparisons) if text])
        part.tables.append(_methods_table(group, *comparisons))
        part.figures = [
            figures.quality_figure(f"quality-{number}-{name}", "", comparison, families)
            for name, comparison in zip(("ppl", "kl"), comparisons, strict=True)
            if comparison.points
        ]
        part.points = [
            f"Failed: sample {record.sample} of `{record.method}`: {record.error}"
            for record in group
            if record.status != "ok"
        ]
        section.sections.append(part)
    return section


def _methods_table(records: Sequence[Record], ppl: Comparison, kl: Comparison) -> Table:
    intervals = {point.method: (point.low, point.high) for point in kl.points}
    verdicts = {point.method: point.difference for point in ppl.points}
    rows = []
    for row in summary.summarise(records):
        name, smaller, at_16_bit, compressed, megabytes, kept, perplexity, divergence, top1, decode, samples = (
            row.cells()
        )
        low, high = intervals.get(row.method, (None, None))
        verdict = verdicts.get(row.method)
        rows.append(
            [
                Cell(name),
                Cell(smaller, row.memory_ratio),
                Cell(at_16_bit, row.memory_ratio_16bit),
                Cell(compressed),
                Cell(megabytes, row.kv_megabytes),
                Cell(kept, row.kept_tokens),
                Cell(perplexity, row.ppl),
                Cell(verdict.verdict if isinstance(verdict, PairedDifference) and row.method != "exact" else "–"),
                Cell(divergence, row.kl),
                Cell("–" if low is None or high is None else f"{low:.4f} to {high:.4f}", low),
                Cell(top1, row.top1_agreement),
                Cell(decode, row.decode[1] if row.decode else None),
                Cell("–" if row.decode_ms is None else f"{row.decode_ms:.3g}", row.decode_ms),
                Cell(samples, row.samples),
            ]
        )
    head = ["method", "× smaller", "at 16 bit", "compressed", "KV MB", "tokens kept", "ppl", "ppl against exact"]
    head += ["KL (nats)", "KL, 95 %", "top-1", "decode × exact", "ms a token", "samples"]
    return Table(
        "Means over samples. × smaller compares with the exact cache of the same run, at 16 bit with one of 16 bits a "
        "value. Compressed: whether anything was evicted or packed when the last token was scored. Decode: time of one "
        "step over exact's, taken in turns, the median of all steps (quartiles).",
        head,
        rows,
    )


def _task_section(results: Sequence[EvalResult], families: Sequence[str]) -> Section | None:
    if not results:
        return None
    section = Section("Tasks", ["Every score went through the compressed cache of its method."])
    for number, (title, group) in enumerate(alike(results, task_title, task_facts).items()):
        comparison = task_scores(group)
        part = Section(title, [text for text in [ranking(comparison)] if text], tables=[_task_table(group, comparison)])
        if len(comparison.points) > 1:
            part.figures.append(figures.quality_figure(f"task-{number}", "", comparison, families))
        section.sections.append(part)
    return section


def _task_table(results: Sequence[EvalResult], comparison: Comparison) -> Table:
    differences = {point.method: point.difference for point in comparison.points}
    rows = []
    for result in results:
        found = differences.get(result.method)
        if isinstance(found, PairedDifference):
            texts = [f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"]
            texts += [f"{found.wins} / {found.ties} / {found.losses}", found.verdict]
        else:
            texts = ["–", "–", str(found) if found is not None else result.error or "–"]
        error = "" if result.stderr is None else f" ± {result.stderr:.3f}"
        score = "failed" if result.score is None else f"{result.score:.3f}{error}"
        rows.append(
            [
                Cell(result.method),
                Cell(score, result.score),
                Cell("–" if result.kv_bytes is None else f"{result.kv_bytes / 1e6:.2f}", result.kv_bytes),
                *(
                    Cell("–" if ratio is None else f"{ratio:.2f}", ratio)
                    for ratio in (result.memory_ratio, result.memory_ratio_16bit)
                ),
                Cell(f"{result.compressed} of {len(result.samples)}", result.compressed),
                Cell(texts[0], found.mean if isinstance(found, PairedDifference) else None),
                *map(Cell, texts[1:]),
            ]
        )
    head = ["method", f"{comparison.measure} ± s.e.", "KV MB", "× smaller", "at 16 bit"]
    return Table(
        "× smaller compares with the exact cache of the same run. Compressed: samples of which something was "
        "evicted or packed when they were scored.",
        [*head, "compressed", "difference to exact [95 %]", "win / tie / loss", "verdict"],
        rows,
    )


def _needle_section(tasks: Sequence[TaskResult]) -> Section | None:
    placed = [task for task in tasks if task.places and task.result.status == "ok"]
    if not placed:
        return None
    section = Section("Where the answer stood", ["Mean score by the depth of the answer and the length of the prompt."])
    for number, (title, group) in enumerate(alike(placed, _place_title, _place_facts).items()):
        grids = {method: _grid(own) for method, own in grouped(group, lambda task: task.result.method).items()}
        section.sections.append(Section(title, figures=[figures.heat_maps(f"depth-{number}", title, grids)]))
    return section


def _place_title(task: TaskResult) -> str:
    where = "inside" if task.result.query_aware else "after"
    return f"{task.family or task.result.task} with {task.result.model}, the question {where} the compressed part"


def _place_facts(task: TaskResult) -> dict[str, Any]:
    """Tasks of one family that differ in length alone are columns of one map."""
    facts = {name: value for name, value in task_facts(task.result).items() if name not in LENGTHS}
    return {**facts, "family": task.family or task.result.task}


def _grid(tasks: Sequence[TaskResult]) -> tuple[list[int], list[float], np.ndarray]:
    """Lengths, depths and mean scores [depths, lengths] of one method."""
    cells: dict[tuple[float, int], list[float]] = {}
    depths = sorted({depth for task in tasks for depth, _ in task.places.values()})
    if len(depths) > MOST_DEPTHS:
        depths = [(step + 0.5) / MOST_DEPTHS for step in range(MOST_DEPTHS)]
    for task in tasks:
        for sample in task.result.samples:
            if sample.score is not None and sample.doc_id in task.places:
                depth, length = task.places[sample.doc_id]
                nearest = min(depths, key=lambda each: abs(each - depth))
                cells.setdefault((nearest, length), []).append(sample.score)
    lengths = sorted({length for _, length in cells})
    scores = np.full((len(depths), len(lengths)), math.nan)
    for (depth, length), values in cells.items():
        scores[depths.index(depth), lengths.index(length)] = fmean(values)
    return lengths, depths, scores


def _kept_section(results: Results) -> Section | None:
    section = Section("Kept tokens", ["Which positions of the first sample's prefix each layer and KV head kept."])
    for number, (title, group) in enumerate(alike(results.records, record_title, record_facts).items()):
        part = Section(f"Kept: {title}")
        complete: list[str] = []
        for record in group:
            details = results.details.get(record.key)
            if details is None or not details.kept or record.status != "ok":
                continue
            if all((layer >= 0).sum() == layer.shape[0] * record.tokens_prefix for layer in details.kept):
                complete.append(f"`{record.method}`")
                continue
            name = f"kept-{number}-{len(part.figures)}"
            part.figures.append(figures.kept_map(name, record.method, details.kept, record.tokens_prefix))
        if complete:
            part.text.append(f"All positions are kept by {', '.join(dict.fromkeys(complete))}.")
        if part.figures:
            section.sections.append(part)
    return section if section.sections else None


def _divergence_section(results: Results) -> Section | None:
    section = Section("KL along the scored tokens")
    for number, (title, group) in enumerate(alike(results.records, record_title, record_facts).items()):
        lines = {}
        for method, records in by_method(group).items():
            curves = [results.details[record.key].kl for record in records if record.key in results.details]
            if method != "exact" and curves and len({len(curve) for curve in curves}) == 1:
                lines[method] = np.mean(curves, axis=0)
        if lines:
            drawn = figures.divergence_figures(f"kl-{number}", lines)
            section.sections.append(Section(f"KL: {title}", figures=drawn))
    return section if section.sections else None


def _time_section(records: Sequence[Record]) -> Section | None:
    section = Section("Decode time", ["Time of one step over exact's, as in the tables above."])
    kinds = alike(
        records,
        lambda record: f"Time: {record.model}, {record.dtype} on {record.device}",
        lambda record: {name: value for name, value in record_facts(record).items() if name != "prefix"},
    )
    for number, (title, group) in enumerate(kinds.items()):
        times: dict[str, dict[int, tuple[float, float, float]]] = {}
        for length, same in sorted(grouped(group, lambda record: record.tokens_prefix).items()):
            for row in summary.summarise(same):
                if row.decode is not None:
                    times.setdefault(row.method, {})[length] = row.decode
        if times:
            section.sections.append(Section(title, figures=[figures.time_figure(f"time-{number}", times)]))
    return section if section.sections else None


def _streaming_section(streams: Sequence[StreamRecord]) -> Section | None:
    if not streams:
        return None
    section = Section("Streaming")
    kinds = alike(streams, lambda line: f"{line.model}, {line.dtype} on {line.device}", stream_facts)
    for number, (title, group) in enumerate(kinds.items()):
        segments = group[0].segments
        calls = sorted({line.tokens_per_call for line in group if line.tokens_per_call is not None})
        text = "One text is fed." if segments == 1 else f"{segments} segments of one text are the rows of a batch."
        if calls and calls[-1] > 1:
            text += (
                f" Up to {calls[-1]} tokens are fed in one call, and a method that acts on every call evicts once a "
                "call; times are of calls of one token a segment."
            )
        part = Section(f"{title}, {max(line.end for line in group)} tokens", [text])
        rows = streaming_summary.summarise(group)
        cells = [[Cell(text, _number(text)) for text in row.cells()] for row in rows]
        head: list[str] = list(streaming_summary.COLUMNS)
        part.tables.append(Table(streaming_summary.NOTE, head, cells))
        part.figures = _streaming_figures(number, group) if rows else []
        part.points = [
            f"`{line.method}` after {line.begin} tokens: {line.status}: {line.error}"
            for line in group
            if line.status != "ok"
        ]
        section.sections.append(part)
    return section


def _streaming_figures(number: int, group: Sequence[StreamRecord]) -> list[Figure]:
    measures = ("ppl", "kv_bytes", "ms_per_call")
    return [figures.streaming_figure(f"stream-{number}-{name}", name, group) for name in measures]


def _number(text: str) -> float | None:
    try:
        return float(text.removeprefix("x").partition(" ")[0])
    except ValueError:
        return None
