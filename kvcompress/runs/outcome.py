"""Runs a config of any protocol and gives what to show of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from kvcompress.runs import streaming_summary, summary
from kvcompress.runs.config import RunConfig, StreamingConfig
from kvcompress.runs.records import write_whole
from kvcompress.runs.runner import Progress
from kvcompress.runs.runner import run as run_prefix
from kvcompress.runs.streaming import run_streaming


@dataclass
class Outcome:
    """A table for the terminal, the same as Markdown, a figure, and what failed."""

    records_name: str
    table: Table
    markdown: str
    draw: Callable[[], bytes]
    failures: list[str]

    def write(self, folder: Path) -> None:
        """Writes summary.md and summary.png."""
        write_whole(folder / "summary.md", self.markdown)
        write_whole(folder / "summary.png", self.draw())


def run(config: RunConfig | StreamingConfig, folder: Path, progress: Progress) -> Outcome:
    """Runs `config` into `folder`; see `runner.run` and `streaming.run_streaming` for what they raise."""
    if isinstance(config, StreamingConfig):
        lines = run_streaming(config, folder, progress)
        points = streaming_summary.summarise(lines)
        title = f"{config.model}, {config.data}: {config.tokens} tokens" + (
            f" x {config.segments}" if config.segments > 1 else ""
        )
        return Outcome(
            "streaming.jsonl",
            streaming_summary.rich_table(points, title),
            streaming_summary.markdown(points, title),
            lambda: streaming_summary.figure(lines, title),
            [f"{line.method} after {line.begin} tokens: {line.error}" for line in lines if line.status == "failed"],
        )
    records = run_prefix(config, folder, progress)
    rows = summary.summarise(records)
    title = f"{config.model}, {config.data}: prefix {config.prefix}, {config.scored} scored"
    return Outcome(
        "records.jsonl",
        summary.rich_table(rows, title),
        summary.markdown(rows, title),
        lambda: summary.figure(rows, title),
        [f"sample {each.sample} {each.method}: {each.error}" for each in records if each.status != "ok"],
    )
