"""Writes a report: one HTML page that needs nothing else, the same as Markdown with figures, and all numbers."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup, escape

from kvcompress.evals.results import EvalResult
from kvcompress.measure.record import versions
from kvcompress.runs.records import write_whole
from kvcompress.runs.report.content import Cell, Listing, Section, Table
from kvcompress.runs.report.reading import Results
from kvcompress.runs.report.sections import sections
from kvcompress.runs.report.settings import grouped


def write_report(results: Results, out: Path) -> list[Path]:
    """Writes report.html, report.md with its figures in report/, and report.parquet into `out`, and gives their paths.

    Without pyarrow there is no report.parquet. Raises RecordsError if `out` cannot be written.
    """
    parts = [*sections(results), _making(results)]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kvcompress.runs.report", "."),
        autoescape=lambda name: bool(name and "html" in name),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"code": code, "breakable": breakable, "cell": markdown_cell}
    content: dict[str, Any] = {"title": title(results), "summary": summary(results), "parts": parts, "results": results}
    out.mkdir(parents=True, exist_ok=True)
    figures = out / "report"
    for figure in _figures(parts):
        figures.mkdir(exist_ok=True)
        write_whole(figures / f"{figure.name}.png", figure.png)
    page, text, table = (out / name for name in ("report.html", "report.md", "report.parquet"))
    write_whole(page, environment.get_template("report.html.jinja").render(content))
    markdown = environment.get_template("report.md.jinja").render(content)
    write_whole(text, re.sub(r"\n{3,}", "\n\n", markdown).strip() + "\n")
    if find_spec("pyarrow") is None:
        return [page, text]
    write_whole(table, parquet(results))
    return [page, text, table]


def title(results: Results) -> str:
    """The models that the report is about."""
    models = [each.model for each in (*results.records, *results.streams)]
    models += [task.result.model for task in results.tasks]
    return "KV-cache compression of " + ", ".join(dict.fromkeys(Path(model).name for model in models))


def summary(results: Results) -> str:
    """How much there is, in one sentence."""
    counts = (
        (len(results.records), "records of compressed prefixes"),
        (len(results.streams), "buckets of streamed text"),
        (len(results.tasks), "results of tasks"),
    )
    return ", ".join(f"{count} {what}" for count, what in counts if count)


def code(text: str) -> Markup:
    """HTML in which what stands between backquotes is code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def breakable(text: str) -> Markup:
    """HTML of a method or a path that may break behind brackets, equals signs and slashes, not within words."""
    return Markup(re.sub(r"([(=/])", r"\1<wbr>", str(escape(text))))


def markdown_cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", "<br>")


def parquet(results: Results) -> bytes:
    """Every record, bucket and task result as a row, told apart by `kind`; nested values as JSON."""
    import pyarrow
    from pyarrow import parquet as writer

    rows = [{"kind": "prefix", **asdict(record)} for record in results.records]
    rows += [{"kind": "streaming", **asdict(record)} for record in results.streams]
    rows += [{"kind": "task", **asdict(task.result)} for task in results.tasks]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    flat = {name: [_flat(row.get(name)) for row in rows] for name in columns}
    out = io.BytesIO()
    writer.write_table(pyarrow.table(flat), out)
    return out.getvalue()


def _flat(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value


def _figures(parts: Sequence[Section]) -> list[Any]:
    return [figure for part in parts for figure in (*part.figures, *_figures(part.sections))]


def _making(results: Results) -> Section:
    """Commands, configs, versions and hashes."""
    section = Section("How this was made")
    section.listings.append(Listing("Commands, from the configs below", commands(results), "sh"))
    for folder, config in results.configs.items():
        text = yaml.safe_dump(config.model_dump(), sort_keys=False)
        section.listings.append(Listing(f"{folder / 'config.yaml'}", text, "yaml"))
    found = [each.versions for each in (*results.records, *results.streams)]
    found += [task.result.versions for task in results.tasks]
    names = list(dict.fromkeys(name for each in found for name in each))
    rows = []
    for name in names:
        seen = ", ".join(dict.fromkeys(each[name] for each in found if name in each))
        rows.append([Cell(name), Cell(seen), Cell(versions().get(name, "–"))])
    section.tables.append(Table("Versions", ["package", "measured with", "reported with"], rows, code=False))
    hashes = [[Cell(str(path)), Cell(digest)] for path, digest in results.hashes.items()]
    if hashes:
        section.tables.append(Table("SHA-256 of every file read", ["file", "hash"], hashes))
    keys: dict[str, list[str]] = {}
    for record in (*results.records, *results.streams):
        keys.setdefault(record.method, []).append(record.config_hash)
    if keys:
        hashed = [[Cell(method), Cell(" ".join(dict.fromkeys(own)))] for method, own in keys.items()]
        section.tables.append(Table("Config hash of each method's records", ["method", "hashes"], hashed))
    return section


def commands(results: Results) -> str:
    """What to run for the same results and the same report."""
    lines = [
        f"kvcompress run {shlex.quote(str(folder / 'config.yaml'))} --out {shlex.quote(str(folder))}"
        for folder in results.configs
    ]
    lines += [_eval_command(group) for group in grouped([t.result for t in results.tasks], _same_command).values()]
    lines.append("kvcompress report " + " ".join(shlex.quote(str(folder)) for folder in results.folders))
    return "\n".join(lines) + "\n"


def _same_command(result: EvalResult) -> str:
    return json.dumps([result.model, result.settings], sort_keys=True, default=str)


def _eval_command(results: Sequence[EvalResult]) -> str:
    first = results[0]
    options: dict[str, Any] = {
        "--model": first.model,
        "--tasks": ",".join(dict.fromkeys(result.task for result in results)),
        "--methods": ",".join(dict.fromkeys(result.method for result in results)),
        "--num_fewshot": first.settings.get("num_fewshot"),
        "--limit": None if first.limit is None else f"{first.limit:g}",
        "--seed": first.seed,
        "--prefill_chunk": first.settings.get("prefill_chunk"),
        "--metadata": json.dumps(first.settings["metadata"]) if first.settings.get("metadata") else None,
    }
    words = [word for name, value in options.items() if value is not None for word in (name, shlex.quote(str(value)))]
    if first.settings.get("apply_chat_template"):
        words.append("--apply_chat_template")
    return "kvcompress eval " + " ".join(words)
