"""The commands `replay` and `size`, as plain functions for the command line to register."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from kvcompress.prefix.requests import OnError, Trace
from kvcompress.prefix.segments import Cut

if TYPE_CHECKING:
    from kvcompress.prefix.replay_report import ReplayReport

SHOWN_MESSAGES = 5


def replay(
    trace: Annotated[
        Path, typer.Argument(help="YAML of labelled segments, JSONL of token ids, or Mooncake JSONL; gzipped or not.")
    ],
    cap: Annotated[
        list[int] | None,
        typer.Option(
            help="Capacity in blocks, may be repeated; by default the trace's own, or 10, 25 and 50 % of what suffices."
        ),
    ] = None,
    block: Annotated[
        int | None,
        typer.Option(
            help="Tokens in a block; by default what the trace says, or else 512 for Mooncake and 16 for token ids."
        ),
    ] = None,
    cut: Annotated[Cut | None, typer.Option(help="How labelled segments become blocks.")] = None,
    reserve: Annotated[int, typer.Option(help="Last tokens of every prompt that are computed in any case.")] = 0,
    on_error: Annotated[OnError, typer.Option(help="What to do at a bad line.")] = "stop",
    prices: Annotated[Path | None, typer.Option(help="Price file; prints what the day costs under its rules.")] = None,
    model: Annotated[str | None, typer.Option(help="Model in the price file, for its minimum prompt.")] = None,
    breakpoints: Annotated[
        list[str] | None,
        typer.Option(
            "--breakpoint", help="'end' or a segment's label, with '=1h' for a TTL; may be repeated. By default 'end'."
        ),
    ] = None,
    gap: Annotated[float, typer.Option(help="Seconds between requests where the trace has no times.")] = 60.0,
    first_token: Annotated[float, typer.Option(help="Seconds until a response begins.")] = 1.0,
    nodes: Annotated[int, typer.Option(help="How many nodes of the prompt tree to show, the busiest first.")] = 30,
    png: Annotated[Path | None, typer.Option(help="Write a figure of hit rate against capacity here.")] = None,
    real: Annotated[
        bool,
        typer.Option("--real", help="Also replay over real KV: a tiny model's, in a prefix cache of each capacity."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Replay a trace of prompts through prefix-cache policies: what would be recomputed."""
    from kvcompress.prefix import replay_report
    from kvcompress.prefix.trace import read_trace

    try:
        read = read_trace(trace, block=block, cut=cut, on_error=on_error, keep_tokens=real)
        _warn_skipped(read)
        report = _report(read, cap, reserve, nodes)
        if prices is not None:
            _add_cost(report, prices, model, breakpoints or [], gap, first_token)
        if png is not None:
            replay_report.plot_capacity(report, png)
        if real:
            _add_real(report)
    except (ValueError, OSError) as error:
        _fail(error)
    if as_json:
        typer.echo(json.dumps(replay_report.as_json(report), indent=2, allow_nan=False))
    else:
        console = Console()
        for part in replay_report.render(report):
            console.print(part, soft_wrap=isinstance(part, Text))


def size(
    model: Annotated[str, typer.Argument(help="A built-in model, a folder with a config.json, or a Hub id.")],
    context: Annotated[
        int | None, typer.Option(help="Tokens of every sequence; by default the model's longest.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    budget: Annotated[str, typer.Option(help="Memory for KV, such as '80GiB'.")] = "80GiB",
    method: Annotated[str, typer.Option(help="A method in its text form.")] = "exact",
    dtype: Annotated[str | None, typer.Option(help="Of the cache; by default the configuration's own.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """KV bytes per token from a model's configuration alone, and how many tokens and users fit."""
    from kvcompress.budget import parse_bytes
    from kvcompress.models import load_config
    from kvcompress.prefix.size_report import describe, render_size
    from kvcompress.prefix.sizes import kv_size

    try:
        limit = parse_bytes(budget)
        facts = describe(model, kv_size(load_config(model), dtype), context, batch, limit, method)
    except (ValueError, OSError) as error:
        _fail(error)
    if as_json:
        typer.echo(json.dumps(facts, indent=2, allow_nan=False))
    else:
        Console().print(render_size(facts))


def _report(trace: Trace, caps: list[int] | None, reserve: int, nodes: int) -> "ReplayReport":
    from kvcompress.prefix.capacity import capacities
    from kvcompress.prefix.policies import NoReuse, Policy, Unlimited, replay
    from kvcompress.prefix.replay_report import ReplayReport
    from kvcompress.prefix.tree import prompt_tree

    unlimited: list[Policy] = [NoReuse(), Unlimited(per_stream=True), Unlimited()]
    if not trace.names_streams:
        del unlimited[1]
    counts = capacities(trace, reserve)
    caps = caps or trace.caps or sorted({max(1, counts.enough() * percent // 100) for percent in (10, 25, 50)})
    outcomes = [replay(trace, policy, reserve) for policy in unlimited]
    outcomes += [counts.outcome(cap, leaf_first) for leaf_first in (False, True) for cap in caps]
    return ReplayReport(trace, outcomes, counts, prompt_tree(trace, nodes))


def _add_cost(
    report: "ReplayReport", path: Path, model: str | None, breakpoints: list[str], gap: float, first_token: float
) -> None:
    from kvcompress.prefix.cost import day_cost, parse_mark
    from kvcompress.prefix.prices import load_prices

    prices = load_prices(path)
    marks = [parse_mark(text, prices) for text in breakpoints]
    report.prices = prices
    report.day = day_cost(report.trace, prices, marks=marks, model=model, gap=gap, first_token=first_token)


def _add_real(report: "ReplayReport") -> None:
    from rich.progress import Progress

    from kvcompress.prefix.real_replay import real_replay

    caps = [outcome.cap for outcome in report.outcomes if outcome.policy == "leaf-LRU"]
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("prompts over real KV", total=None)
        report.real = real_replay(
            report.trace, [*caps, None], lambda done, total: bar.update(task, completed=done, total=total)
        )


def _warn_skipped(trace: Trace) -> None:
    for message in trace.skipped[:SHOWN_MESSAGES]:
        typer.echo(f"left out: {message}", err=True)
    if len(trace.skipped) > SHOWN_MESSAGES:
        typer.echo(f"left out: {len(trace.skipped) - SHOWN_MESSAGES:,} more lines", err=True)


def _fail(error: Exception) -> NoReturn:
    typer.echo(f"kvcompress: {error}", err=True)
    raise typer.Exit(2) from None
