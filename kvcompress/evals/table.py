"""The two tables of an evaluation: scores by task and method, and differences to exact."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kvcompress.evals.comparison import Comparison
from kvcompress.evals.results import EvalResult
from kvcompress.measure.statistics import PairedDifference

DIFFERENCE_COLUMNS = ("task", "method", "difference to exact (95 %)", "win / tie / loss", "verdict")


CAPTION = (
    "score ± standard error; stored KV of a sample and how many times smaller than exact of this run (at 16 bits); "
    "samples of which something was evicted or packed when they were scored"
)


def task_label(result: EvalResult) -> str:
    """A row's head: the task, its metric, its few-shot examples, and where the question stands."""
    lines = [result.task, result.metric or ""]
    if result.num_fewshot:
        lines.append(f"{result.num_fewshot}-shot")
    if result.query_aware is not None:
        lines.append("question inside" if result.query_aware else "question after")
    return "\n".join(line for line in lines if line)


def cell(result: EvalResult) -> str:
    """Score ± standard error, stored bytes and how much smaller than exact, and what was compressed."""
    if result.status != "ok":
        return f"failed\n{result.error or ''}"[:120]
    error = "" if result.stderr is None else f" ± {result.stderr:.3f}"
    lines = [f"{result.score:.3f}{error}"]
    if result.kv_bytes is not None and result.memory_ratio is not None and result.memory_ratio_16bit is not None:
        at_16_bit = f"({result.memory_ratio_16bit:.2f}x at 16 bit)"
        lines.append(f"{_size(result.kv_bytes)}, {result.memory_ratio:.2f}x smaller {at_16_bit}")
    lines.append(f"{result.compressed} of {len(result.samples)} compressed")
    if result.truncated:
        lines.append(f"{result.truncated} cut on the left")
    return "\n".join(lines)


def score_rows(results: Sequence[EvalResult]) -> tuple[list[str], list[list[str]]]:
    """The head of the table and its rows: tasks down, methods across; an empty cell for what was not run."""
    methods = list(dict.fromkeys(result.method for result in results))
    rows = []
    for task in dict.fromkeys(result.task for result in results):
        own = {result.method: result for result in results if result.task == task}
        label = next((task_label(result) for result in own.values() if result.metric), task)
        rows.append([label, *(cell(own[method]) if method in own else "" for method in methods)])
    return ["task", *methods], rows


def difference_rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Rows of DIFFERENCE_COLUMNS; a refusal stands where the numbers would."""
    rows = []
    for each in comparisons:
        found = each.difference
        task = f"{each.task}\n{each.score}"
        if isinstance(found, PairedDifference):
            mean = f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
            counts = f"{found.wins} / {found.ties} / {found.losses}"
            rows.append([task, each.method, mean, counts, f"{found.verdict} (n={found.n})"])
        else:
            rows.append([task, each.method, "–", "–", str(found)])
    return rows


def rich_table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str, caption: str | None = None) -> Table:
    """A table for a terminal."""
    table = Table(title=title, caption=caption, show_lines=True)
    for column in head:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], title: str, caption: str | None = None) -> str:
    """The same as Markdown."""
    lines = [f"## {title}", "", _markdown_row(head), "|" + "---|" * len(head), *map(_markdown_row, rows)]
    return "\n".join([*lines, *(["", caption] if caption else [])]) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    # A bar would end the cell.
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", "<br>") for text in cells) + " |"


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e6:.2f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.2f} kB"
