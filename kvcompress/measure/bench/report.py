"""Runs the bench and shows it: a table, JSON with the machine's name, and a figure of time against context."""

from __future__ import annotations

import io
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.table import Table

# They register the cases.
from kvcompress.measure.bench import (  # noqa: F401
    attention_cases,
    length_cases,
    method_cases,
    model_cases,
    segment_cases,
)
from kvcompress.measure.bench.case import Line, NotHere, cases
from kvcompress.measure.record import versions


def run_cases(names: Sequence[str], told: Callable[[str], None]) -> Iterator[list[Line]]:
    """The lines of each named case, or of all; one that cannot run here has a line that says why."""
    for name in names or list(cases):
        told(name)
        try:
            yield cases[name]()
        except NotHere as reason:
            yield [Line(name, "", None, skipped=str(reason))]


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        name = found[1] if found else name
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "versions": versions(),
    }


def table(lines: Sequence[Line]) -> Table:
    """The lines for a terminal; a limit that is missed stands in red."""
    shown = Table(title="ratios in one run: median (quartiles)")
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column in ("what", "against", "") else "right")
    for line in lines:
        *cells, verdict = _cells(line)
        shown.add_row(*cells, f"[red]{verdict}[/red]" if line.passed is False else verdict)
    return shown


def markdown(lines: Sequence[Line]) -> str:
    """The same as a table of Markdown, below the machine's name."""
    here = machine()
    where = here["gpu"] or f"{here['cores']} cores of {here['cpu']}, {here['threads']} threads"
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(_cells, lines)]
    text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    return f"{where}; ratios in one run: median (quartiles).\n\n{text}\n"


COLUMNS = ("what", "against", "measured", "limit", "ms", "ms of the other", "bound, ms", "")


def _cells(line: Line) -> tuple[str, ...]:
    if line.value is None:
        return line.name, line.against, "–", "", "", "", "", f"not run: {line.skipped}"
    spread = "" if line.low is None or line.high is None else f" ({line.low:.3g}–{line.high:.3g})"
    sign = "≥" if line.more_is_better else "≤"
    limit = "" if line.limit is None else f"{sign} {line.limit:.3g}"
    times = [f"{line.detail[key]:.3g}" if key in line.detail else "" for key in ("own_ms", "other_ms", "bound_ms")]
    verdict = {None: "", True: "ok", False: "missed"}[line.passed]
    return line.name, line.against, f"{line.value:.3g}{spread}", limit, *times, verdict


def as_json(lines: Sequence[Line]) -> str:
    content = {"machine": machine(), "lines": [asdict(line) | {"passed": line.passed} for line in lines]}
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def figure(lines: Sequence[Line]) -> bytes | None:
    """Milliseconds of decode attention against context length, as PNG; None if that case was not run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves: dict[str, list[tuple[float, float]]] = {}
    for each in lines:
        if "context" in each.detail:
            context = each.detail["context"]
            curves.setdefault(each.name.split(" decode")[0], []).append((context, each.detail["own_ms"]))
            if each.name.startswith("dense"):
                curves.setdefault(each.against, []).append((context, each.detail["other_ms"]))
    if not curves:
        return None
    picture = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots()
    for (name, points), marker in zip(curves.items(), "osD^v", strict=False):
        axes.plot(*zip(*points, strict=True), marker=marker, label=name)
    axes.set(xlabel="stored tokens", ylabel="ms per decode step and layer", xscale="log", yscale="log")
    axes.set_title("decode attention, 8 KV heads, 4 query heads each, D = 128")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    out = io.BytesIO()
    picture.savefig(out, format="png", dpi=120)
    return out.getvalue()
