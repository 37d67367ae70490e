"""What a run measured, in one table and one figure."""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvcompress.measure.record import Record
from kvcompress.runs.markdown import markdown_table

COLUMNS = ("method", "smaller", "KV MB", "kept", "ppl", "KL", "top-1", "decode", "n")
NOTE = (
    "smaller: times smaller than the exact cache at 16 bits a value. KV MB: stored after prefill and compression. "
    "kept: tokens of each KV head. KL: of the exact predictions to the method's, in nats. "
    "decode: time of one step over the exact one's. n: samples."
)


@dataclass
class Row:
    """One method over its samples; None where every sample failed."""

    method: str
    samples: int
    failed: int
    memory_ratio_16bit: float | None = None
    kv_megabytes: float | None = None
    kept_tokens: float | None = None
    ppl: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    decode_ratio: float | None = None

    def cells(self) -> list[str]:
        """The row as text, in the order of COLUMNS."""
        samples = str(self.samples) if not self.failed else f"{self.samples} ({self.failed} failed)"
        numbers = (
            (self.memory_ratio_16bit, "{:.2f}"),
            (self.kv_megabytes, "{:.2f}"),
            (self.kept_tokens, "{:.0f}"),
            (self.ppl, "{:.3f}"),
            (self.kl, "{:.4f}"),
            (self.top1_agreement, "{:.3f}"),
            (self.decode_ratio, "{:.2f}"),
        )
        return [self.method, *("–" if value is None else form.format(value) for value, form in numbers), samples]


def summarise(records: Sequence[Record]) -> list[Row]:
    """One row a method, in the order of the records. Perplexity is exp of the mean NLL over all scored tokens."""
    by_method: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_method[record.method].append(record)
    rows = []
    for method, group in by_method.items():
        good = [record for record in group if record.status == "ok"]
        row = Row(method, len(good), len(group) - len(good))
        if good:
            row.memory_ratio_16bit = mean(_numbers(good, "memory_ratio_16bit"))
            row.kv_megabytes = mean(_numbers(good, "kv_bytes")) / 1e6
            row.kept_tokens = mean(_numbers(good, "kept_tokens"))
            row.ppl = math.exp(mean(_numbers(good, "nll")))
            row.kl = mean(_numbers(good, "kl"))
            row.top1_agreement = mean(_numbers(good, "top1_agreement"))
            pairs = zip(_numbers(good, "decode_ms_per_token"), _numbers(good, "decode_ms_per_token_exact"), strict=True)
            row.decode_ratio = mean(own / exact for own, exact in pairs)
        rows.append(row)
    return rows


def _numbers(records: Sequence[Record], name: str) -> list[float]:
    return [value if (value := getattr(record, name)) is not None else math.nan for record in records]


def rich_table(rows: Sequence[Row], title: str) -> Table:
    """The table for a terminal."""
    table = Table(title=title, caption=NOTE, caption_justify="left", box=SIMPLE_HEAD)
    table.pad_edge, table.collapse_padding = False, True
    for column in COLUMNS:
        first = column == "method"
        table.add_column(
            column,
            justify="left" if first else "right",
            no_wrap=not first,
            overflow="fold",
            min_width=20 if first else None,
        )
    for row in rows:
        table.add_row(*row.cells())
    return table


def markdown(rows: Sequence[Row], title: str) -> str:
    """The table as Markdown."""
    return f"## {title}\n\n{markdown_table(COLUMNS, [row.cells() for row in rows])}\n{NOTE}\n"


def figure(rows: Sequence[Row], title: str) -> bytes:
    """Perplexity against stored bytes, one marker shape a method family, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots()
    markers = dict(zip(dict.fromkeys(row.method.split("(")[0] for row in rows), "os^Dvp*hX<>", strict=False))
    for row in rows:
        if row.ppl is not None and row.kv_megabytes is not None:
            family = row.method.split("(")[0]
            axes.scatter(row.kv_megabytes, row.ppl, marker=markers.get(family, "o"), s=60, label=row.method)
    axes.set(xlabel="stored KV after prefill and compression (MB)", ylabel="perplexity", title=title, xscale="log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="best")
    out = io.BytesIO()
    picture.savefig(out, format="png", dpi=120)
    return out.getvalue()
