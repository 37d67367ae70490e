"""A replayed trace as tables, as JSON, and as a figure of hit rate against capacity."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvcompress.prefix.capacity import Capacities
from kvcompress.prefix.cost import DayCost
from kvcompress.prefix.policies import Outcome
from kvcompress.prefix.prices import Prices
from kvcompress.prefix.requests import Trace
from kvcompress.prefix.tree import Node, render_tree

if TYPE_CHECKING:
    from kvcompress.prefix.real_replay import RealReplay


@dataclass
class ReplayReport:
    """What there is to show of one replay. `tree`: as `prompt_tree` gives it. `day`: None if no prices were given."""

    trace: Trace
    outcomes: list[Outcome]
    capacities: Capacities
    tree: Node
    day: DayCost | None = None
    prices: Prices | None = None
    real: RealReplay | None = None


def render(report: ReplayReport) -> list[RenderableType]:
    """Tables, one line on the two LRU kinds, the prompt tree and what the day costs, for rich to print in order."""
    trace = report.trace
    parts: list[RenderableType] = [
        Text(
            f"{trace.name}: {len(trace.requests):,} requests, {trace.tokens:,} prompt tokens, "
            f"{len(trace.blocks):,} distinct blocks of {trace.block} tokens"
        ),
        _policy_table(report.outcomes),
        Text(orphan_line(report.outcomes)),
    ]
    if not trace.names_streams:
        parts.append(Text("per-stream is left out: not every request names its stream", style="dim"))
    parts += [Text(), render_tree(report.tree, "prompts")]
    if report.day is not None and report.prices is not None:
        parts += [Text(), _day_table(report.day, report.prices)]
    if report.real is not None:
        parts += [Text(), _real_table(report.real), Text(REAL_NOTE)]
    return parts


def orphan_line(outcomes: list[Outcome]) -> str:
    """What sets LRU and leaf-LRU apart, at the capacity where they differ most."""
    leaf = {outcome.cap: outcome for outcome in outcomes if outcome.policy == "leaf-LRU"}
    pairs = [(outcome, leaf[outcome.cap]) for outcome in outcomes if outcome.policy == "LRU" and outcome.cap in leaf]
    if not pairs:
        return "no capacity given, so LRU and leaf-LRU are not compared"
    lru, other = max(pairs, key=lambda pair: pair[0].recomputed - pair[1].recomputed)
    if lru.recomputed == other.recomputed:
        return "LRU and leaf-LRU recompute the same at these capacities"
    return (
        f"at {lru.cap:,} blocks LRU recomputes {lru.recomputed - other.recomputed:,} tokens more than leaf-LRU: it "
        f"evicts parents first, and prompts asked for {lru.orphaned_blocks:,} orphaned children, blocks still held but "
        f"out of reach ({lru.orphaned_tokens:,} tokens)"
    )


def as_json(report: ReplayReport) -> dict[str, Any]:
    """The same as plain values; rates are shares of 1, costs are in base input tokens."""
    trace = report.trace
    result: dict[str, Any] = {
        "trace": trace.name,
        "requests": len(trace.requests),
        "tokens": trace.tokens,
        "block": trace.block,
        "distinct_blocks": len(trace.blocks),
        "skipped": trace.skipped,
        "policies": [{**asdict(outcome), "hit_rate": outcome.hit_rate} for outcome in report.outcomes],
        "lru_against_leaf_lru": orphan_line(report.outcomes),
        "tree": asdict(report.tree),
    }
    if report.day is not None and report.prices is not None:
        day = report.day
        result["cost"] = {
            **asdict(day),
            "cost_uncached": day.cost_uncached,
            "share": day.share,
            "prices": report.prices.about,
            "as_of": report.prices.as_of,
        }
    if report.real is not None:
        result["real"] = asdict(report.real)
    return result


def plot_capacity(report: ReplayReport, path: Path) -> None:
    """Writes a figure of hit rate against capacity, exact at every capacity, for LRU and leaf-LRU."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = report.capacities
    most = min(len(report.trace.blocks), max(1, 5 * counts.enough() // 4))
    caps = np.unique(np.linspace(0, most, 2000).astype(int))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for hits, label in ((counts.leaf_hits, "leaf-LRU"), (counts.lru_hits, "LRU")):
        axes.step(caps, 100 * hits[np.minimum(caps, len(hits) - 1)] / counts.tokens, where="post", label=label)
    axes.axhline(100 * counts.leaf_hits[-1] / counts.tokens, color="0.6", linestyle=":", label="global, unlimited")
    axes.set(
        xlabel=f"capacity (blocks of {report.trace.block} tokens)",
        ylabel="prompt tokens served from the cache (%)",
        title=report.trace.name,
        xlim=(0, max(most, 1)),
        ylim=(0, 100),
    )
    axes.legend(loc="lower right")
    FigureCanvasAgg(figure).print_png(path)


def _policy_table(outcomes: list[Outcome]) -> Table:
    table = Table("policy")
    for heading in ("capacity", "recomputed", "hit rate", "orphaned"):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        table.add_row(
            outcome.policy,
            "" if outcome.cap is None else f"{outcome.cap:,}",
            f"{outcome.recomputed:,}",
            f"{outcome.hit_rate:.1%}",
            f"{outcome.orphaned_blocks:,}" if outcome.policy == "LRU" else "",
        )
    return table


def _day_table(day: DayCost, prices: Prices) -> Table:
    table = Table(f"input under {day.model}'s rules ({prices.as_of})", caption="cost in base input tokens")
    for heading in ("tokens", "price", "cost"):
        table.add_column(heading, justify="right")
    rows = [("read", day.read, prices.read)]
    rows += [(f"written, {ttl}", day.written[ttl], price) for ttl, price in prices.write.items() if ttl in day.written]
    rows.append(("plain", day.plain, 1.0))
    for label, tokens, price in rows:
        table.add_row(label, f"{tokens:,}", f"{price:g}", f"{tokens * price:,.0f}")
    table.add_section()
    table.add_row("total", f"{day.tokens:,}", f"{day.share:.3f}", f"{day.cost:,.0f}")
    table.add_row("without a cache", f"{day.tokens:,}", "1", f"{day.cost_uncached:,.0f}")
    return table


def _real_table(real: RealReplay) -> Table:
    table = Table("capacity", title=f"over the KV of {real.model}, in blocks of {real.block} tokens")
    for heading in ("recomputed", "simulated", "bytes held", "logits differ by"):
        table.add_column(heading, justify="right")
    for outcome in real.outcomes:
        table.add_row(
            "unlimited" if outcome.cap is None else f"{outcome.cap:,}",
            f"{outcome.recomputed:,}",
            f"{outcome.simulated:,}",
            f"{outcome.bytes_held:,}",
            f"{outcome.difference:g}",
        )
    return table


REAL_NOTE = (
    "leaf-LRU; logits are compared with those of computing the whole prompt in the same chunks. A real cache stores "
    "full blocks of tokens, whatever segments they belong to, makes room before it stores one, and computes at least "
    "the last token: where the table above cuts each segment into blocks by itself, its counts are others"
)
