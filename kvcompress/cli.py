"""The command line. A user's mistake ends in one message and exit code 2, never in a traceback."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kvcompress.evals.command import eval_
from kvcompress.prefix.commands import replay, size

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
console = Console()


@app.callback()
def _root() -> None:
    """Lossy KV-cache compression on Hugging Face models, measured against the exact prefix."""


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="A YAML file, such as configs/quickstart.yaml.")],
    out: Annotated[Path | None, typer.Option(help="Results folder; by default runs/<name of the config>.")] = None,
) -> None:
    """Run an experiment. Killed or stopped, the same command goes on where it was. Exits with 1 if a method failed."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from kvcompress.runs import outcome
    from kvcompress.runs.config import ConfigError, read_config

    settings = read_config(config)
    folder = out if out is not None else Path("runs") / config.stem
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("starting", total=None)
            ran = outcome.run(
                settings,
                folder,
                lambda text, done, total: bar.update(task, description=text, completed=done, total=total),
            )
    except ConfigError as error:
        raise ConfigError("\n".join(f"{config}: {line}" for line in str(error).splitlines())) from error
    except KeyboardInterrupt:
        _complain(f"stopped; finished records are safe in {folder}, the same command goes on from there")
        raise typer.Exit(130) from None
    console.print(ran.table)
    ran.write(folder)
    for failure in ran.failures:
        console.print(f"[red]failed[/red] {escape(failure)}", markup=True, highlight=False)
    console.print(f"{ran.records_name}, summary.md and summary.png are in {folder}", highlight=False)
    if ran.failures:
        raise typer.Exit(1)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Results folders of `run` and `eval`.")],
    out: Annotated[Path | None, typer.Option(help="Where to write; by default the first folder.")] = None,
    sink: Annotated[str | None, typer.Option(help="Also send the numbers to trackio or wandb.")] = None,
) -> None:
    """Write report.html, report.md and, with pyarrow, report.parquet of results folders."""
    from kvcompress.runs.report.reading import read_results
    from kvcompress.runs.report.sinks import send
    from kvcompress.runs.report.writing import write_report

    results = read_results(folders)
    for reason in results.skipped:
        console.print(f"left out: {reason}", markup=False, highlight=False)
    if sink is not None:
        console.print(f"{send(results, sink)} rows sent to {sink}", highlight=False)
    written = write_report(results, out or folders[0])
    for path in written:
        console.print(str(path), highlight=False, soft_wrap=True)
    if not any(path.suffix == ".parquet" for path in written):
        console.print(
            "no report.parquet: pyarrow is not installed; install kvcompress[report]", markup=False, highlight=False
        )


@app.command()
def bench(
    case: Annotated[list[str] | None, typer.Argument(help="Cases to run; all by default.")] = None,
    check: Annotated[bool, typer.Option(help="Exit with 1 if a limit is missed.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for bench.json, bench.md and bench.png, written as each case ends.")
    ] = None,
) -> None:
    """Time and bytes beside what you would pick instead, as paired ratios in one run."""
    from kvcompress.measure.bench.case import cases
    from kvcompress.measure.bench.report import as_json, figure, markdown, run_cases, table
    from kvcompress.runs.records import write_whole
    from kvcompress.text_form import nearest

    for name in case or []:
        if name not in cases:
            raise ValueError(f"unknown case {name!r}{nearest(name, list(cases))}")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    lines = []
    for more in run_cases(case or [], lambda name: console.print(f"running {name}", highlight=False)):
        lines += more
        if out is not None:
            write_whole(out / "bench.json", as_json(lines))
            write_whole(out / "bench.md", markdown(lines))
            picture = figure(lines)
            if picture is not None:
                write_whole(out / "bench.png", picture)
    console.print(table(lines))
    if check and any(line.passed is False for line in lines):
        raise typer.Exit(1)


app.command("eval")(eval_)


app.command()(replay)
app.command()(size)


@app.command()
def methods() -> None:
    """List the methods with their options."""
    from dataclasses import MISSING, fields

    from kvcompress.methods import methods as known

    for name, method in known().items():
        options = [each.name if each.default is MISSING else f"{each.name}={each.default!r}" for each in fields(method)]
        summary = (method.__doc__ or "").strip().splitlines()[0]
        console.print(f"{name}({', '.join(options)})", highlight=False, markup=False)
        console.print(f"    {summary}", highlight=False, markup=False)
    console.print(
        "compose an evicting method with kivi: snapkv(budget=0.25) | kivi(bits=2)", markup=False, highlight=False
    )


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="A built-in model: smollm2-135m.")]) -> None:
    """Fetch a built-in model once; it is kept under $KVCOMPRESS_CACHE."""
    from kvcompress.models import fetch as fetch_model

    console.print(f"{name} is in {fetch_model(name)}", highlight=False)


def main() -> None:
    """The entry point of `kvcompress`."""
    warnings.showwarning = lambda message, *about: _complain(f"warning: {message}")
    try:
        app()
    except (ValueError, OSError) as error:
        _complain(str(error))
        sys.exit(2)


def _complain(message: str) -> None:
    Console(stderr=True).print(f"kvcompress: {message}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
