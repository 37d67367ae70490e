"""What a streaming run measured, in one table and one figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvcompress.measure.streaming import StreamRecord
from kvcompress.runs.figures import drawing, plot_lines, to_png
from kvcompress.runs.markdown import markdown_table

COLUMNS = ("method", "tokens fed", "ppl Q1", "Q2", "Q3", "Q4", "KV MB", "grew", "ms per call")
NOTE = (
    "Q1 to Q4: quarters of the text. grew: stored KV at the end over that half way. ms per call: of one token a "
    "segment, median (quartiles) of a bucket, each the median over the buckets."
)


@dataclass
class Row:
    """One method along the text; perplexities are None for quarters that it did not reach.

    Of `ms_per_call` and its quartiles in each bucket, the medians over the buckets; older records have no quartiles.
    """

    method: str
    tokens: int
    quarters: list[float | None]
    kv_megabytes: float
    growth: float
    ms_per_call: float
    ms_per_call_quartiles: tuple[float, float] | None

    def cells(self) -> list[str]:
        """The row as text, in the order of COLUMNS."""
        perplexities = ["–" if value is None else f"{value:.4g}" for value in self.quarters]
        numbers = [f"{self.kv_megabytes:.2f}", f"x{self.growth:.2f}", self.time_text]
        return [self.method, str(self.tokens), *perplexities, *numbers]

    @property
    def time_text(self) -> str:
        """The median time, with the quartiles behind it."""
        if self.ms_per_call_quartiles is None:
            return _milliseconds(self.ms_per_call)
        low, high = map(_milliseconds, self.ms_per_call_quartiles)
        return f"{_milliseconds(self.ms_per_call)} ({low}–{high})"


def _milliseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def by_method(records: Sequence[StreamRecord]) -> dict[str, list[StreamRecord]]:
    """The measured buckets of each method, in the order of the text."""
    found: dict[str, list[StreamRecord]] = {}
    for record in records:
        if record.status == "ok" and record.nll is not None:
            found.setdefault(record.method, []).append(record)
    return {method: sorted(lines, key=lambda line: line.end) for method, lines in found.items()}


def summarise(records: Sequence[StreamRecord]) -> list[Row]:
    """One row a method. A perplexity is exp of the mean NLL over the scored tokens of its buckets."""
    groups = by_method(records)
    longest = max((lines[-1].end for lines in groups.values()), default=0)
    rows = []
    for method, lines in groups.items():
        limits = [longest * quarter / 4 for quarter in range(5)]
        quarters = [perplexity([line for line in lines if low < line.end <= high]) for low, high in pairwise(limits)]
        half = next(line for line in lines if line.end >= lines[-1].end / 2)
        last = lines[-1].kv_bytes or 0
        spreads = [line.ms_per_call_quartiles for line in lines if line.ms_per_call_quartiles]
        rows.append(
            Row(
                method,
                lines[-1].end,
                quarters,
                last / 1e6,
                last / (half.kv_bytes or 1),
                median(line.ms_per_call or 0.0 for line in lines),
                (median(low for low, _ in spreads), median(high for _, high in spreads)) if spreads else None,
            )
        )
    return rows


def perplexity(lines: Sequence[StreamRecord]) -> float | None:
    """exp of the mean NLL over all scored tokens; None without any."""
    tokens = sum(line.tokens_scored or 0 for line in lines)
    if not tokens:
        return None
    return math.exp(min(700.0, sum((line.nll or 0.0) * (line.tokens_scored or 0) for line in lines) / tokens))


def rich_table(rows: Sequence[Row], title: str) -> Table:
    """The table for a terminal of 80 columns; the quartiles stand on a second line."""
    table = Table(title=title, caption=NOTE, caption_justify="left", box=SIMPLE_HEAD)
    table.pad_edge, table.collapse_padding = False, True
    for column in COLUMNS:
        first = column == "method"
        table.add_column(
            column.replace(" ", "\n"),
            justify="left" if first else "right",
            no_wrap=not first,
            overflow="fold",
            min_width=14 if first else None,
        )
    for row in rows:
        *cells, time = row.cells()
        table.add_row(*cells, time.replace(" ", "\n"))
    return table


def markdown(rows: Sequence[Row], title: str) -> str:
    """The table as Markdown."""
    return f"## {title}\n\n{markdown_table(COLUMNS, [row.cells() for row in rows])}\n{NOTE}\n"


MEASURES = {
    "ppl": ("perplexity of a bucket", 1.0),
    "kv_bytes": ("stored KV (MB)", 1e-6),
    "ms_per_call": ("ms per call", 1.0),
}
"""What is drawn along the text: its label, and by what it is multiplied."""


def curve(lines: Sequence[StreamRecord], measure: str, scale: float) -> tuple[list[float], list[float]]:
    """The tokens fed when each bucket ends, and a measure of it."""
    return [line.end for line in lines], [(getattr(line, measure) or math.nan) * scale for line in lines]


def spreads(groups: Mapping[str, Sequence[StreamRecord]]) -> dict[str, list[tuple[float, float]]]:
    """Lower and upper quartile of the time of a call in each bucket; methods of older records have none."""
    found = {}
    for method, lines in groups.items():
        if any(line.ms_per_call_quartiles for line in lines):
            ends = [line.ms_per_call_quartiles or (math.nan, math.nan) for line in lines]
            found[method] = [(low, high) for low, high in ends]
    return found


def figure(records: Sequence[StreamRecord], title: str) -> bytes:
    """Perplexity, stored bytes and time (median and quartiles) against tokens fed, one below the other, as PNG."""
    groups = by_method(records)
    picture, axes = drawing(rows=3, height=9.0)
    for panel, (measure, (label, scale)) in zip(axes, MEASURES.items(), strict=True):
        timed = measure == "ms_per_call"
        plot_lines(
            panel,
            {method: curve(group, measure, scale) for method, group in groups.items()},
            "tokens fed",
            f"{label}, median and quartiles" if timed else label,
            log_y=True,
            spreads=spreads(groups) if timed else None,
        )
    axes[0].set_title(title, fontsize=9, wrap=True)
    axes[-1].legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=1, fontsize="small")
    return to_png(picture)
