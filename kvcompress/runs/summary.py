"""What a run measured, in one table and one figure."""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvcompress.measure.record import Record
from kvcompress.measure.speed import quartiles
from kvcompress.runs.markdown import markdown_table

COLUMNS = ("method", "smaller", "at 16 bit", "compressed", "KV MB", "kept", "ppl", "KL", "top-1", "decode", "n")
NOTE = (
    "smaller: times smaller than the exact cache of this run; at 16 bit: than one of 16 bits a value. KV MB: stored "
    "after prefill and compression. kept: tokens of each KV head. KL: of exact's predictions to the method's, in nats. "
    "decode: time of one step over the exact one's, taken in turns: median (quartiles). n: samples."
)


@dataclass
class Row:
    """One method over its samples; None where every sample failed.

    `compressed` says whether anything was evicted or packed when the last token was scored. `decode` are the quartiles
    of all steps' times over the exact cache's, the median in the middle.
    """

    method: str
    samples: int
    failed: int
    memory_ratio: float | None = None
    memory_ratio_16bit: float | None = None
    compressed: str = "–"
    kv_megabytes: float | None = None
    kept_tokens: float | None = None
    ppl: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    decode: tuple[float, float, float] | None = None
    decode_ms: float | None = None
    decode_ms_exact: float | None = None

    def cells(self) -> list[str]:
        """The row as text, in the order of COLUMNS."""
        samples = str(self.samples) if not self.failed else f"{self.samples} ({self.failed} failed)"
        sizes = (_shown(self.memory_ratio, ".2f"), _shown(self.memory_ratio_16bit, ".2f"), self.compressed)
        numbers = (
            (self.kv_megabytes, ".2f"),
            (self.kept_tokens, ".0f"),
            (self.ppl, ".3f"),
            (self.kl, "z.4f"),
            (self.top1_agreement, ".3f"),
        )
        return [self.method, *sizes, *(_shown(value, form) for value, form in numbers), self.decode_text, samples]

    @property
    def decode_text(self) -> str:
        """The median with the quartiles behind it."""
        if self.decode is None:
            return "–"
        low, middle, high = self.decode
        return f"{middle:.2f} ({low:.2f}–{high:.2f})"

    @property
    def changed_little(self) -> bool:
        """Whether the method, or a part of it, left all or some samples as they were."""
        return self.compressed not in ("yes", "–")


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


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
            row.memory_ratio = mean(_numbers(good, "memory_ratio"))
            row.memory_ratio_16bit = mean(_numbers(good, "memory_ratio_16bit"))
            row.compressed = _compressed(good)
            row.kv_megabytes = mean(_numbers(good, "kv_bytes")) / 1e6
            row.kept_tokens = mean(_numbers(good, "kept_tokens"))
            row.ppl = math.exp(mean(_numbers(good, "nll")))
            row.kl = mean(_numbers(good, "kl"))
            row.top1_agreement = mean(_numbers(good, "top1_agreement"))
            row.decode_ms = median(_numbers(good, "decode_ms_per_token"))
            row.decode_ms_exact = median(_numbers(good, "decode_ms_per_token_exact"))
            ratios = [ratio for record in good for ratio in record.decode_ratios or ()]
            row.decode = quartiles(ratios) if ratios else None
        rows.append(row)
    return rows


def _compressed(records: Sequence[Record]) -> str:
    """ "yes", "no", which part of a composition did nothing, or of how many samples something was compressed."""
    if records[0].method == "exact" or any(record.evicted is None or record.packed is None for record in records):
        return "–"
    compressed = [record for record in records if record.evicted or record.packed]
    if not compressed:
        return "no"
    if len(compressed) < len(records):
        return f"{len(compressed)} of {len(records)}"
    if " | " in records[0].method:
        for part in ("evicted", "packed"):
            if not all(getattr(record, part) for record in records):
                return f"not {part}"
    return "yes"


def _numbers(records: Sequence[Record], name: str) -> list[float]:
    return [value if (value := getattr(record, name)) is not None else math.nan for record in records]


def rich_table(rows: Sequence[Row], title: str) -> Table:
    """The table for a terminal of 80 columns: ratios at 16 bits and quartiles stand on a second line.

    So does what was not compressed, under the method.
    """
    table = Table(title=title, caption=NOTE, caption_justify="left", box=SIMPLE_HEAD)
    table.pad_edge, table.padding = False, 0
    for column in COLUMNS:
        if column in ("at 16 bit", "compressed"):
            continue
        first = column == "method"
        table.add_column(
            "smaller\n(16 bit)" if column == "smaller" else column,
            justify="left" if first else "right",
            no_wrap=not first,
            overflow="fold",
            min_width=14 if first else None,
        )
    for row in rows:
        method, smaller, at_16_bit, compressed, *numbers, decode, samples = row.cells()
        below = f"\ncompressed: {compressed}" if row.changed_little else ""
        table.add_row(
            method + below,
            f"{smaller}\n({at_16_bit})",
            *numbers,
            decode.replace(" ", "\n"),
            samples.replace(" ", "\n", 1),
        )
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
