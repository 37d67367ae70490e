"""The figures of a report, each with its alternative text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from kvcompress.measure.streaming import StreamRecord
from kvcompress.runs.figures import COLOURS, DASHES, MARKERS, drawing, plain_log_axis, plot_lines, to_png
from kvcompress.runs.report.content import Figure
from kvcompress.runs.report.quality import Comparison, family
from kvcompress.runs.streaming_summary import MEASURES, by_method, curve, spreads

WIDEST_MAP = 400
"""Columns of a kept-token map; a longer prompt is shown in blocks."""


def quality_figure(name: str, title: str, comparison: Comparison, families: Sequence[str]) -> Figure:
    """Quality against stored bytes, one marker shape for each of `families`, rings around the Pareto front."""
    picture, (axes,) = drawing(height=4.4)
    points = comparison.points
    smallest = min((point.value for point in points if point.value > 1e-9), default=1e-9)
    log_y = not comparison.higher_is_better and max(point.value for point in points) > 8 * smallest
    shown = [point for point in points if not log_y or point.value >= smallest]
    for label, group in _by_family([point.method for point in points]).items():
        index = families.index(label)
        members = sorted((points[place] for place in group if points[place] in shown), key=lambda point: point.kv_bytes)
        if not members:
            continue
        x, y = [point.kv_bytes / 1e6 for point in members], [point.value for point in members]
        colour = COLOURS[index % len(COLOURS)]
        axes.plot(x, y, color=colour, linestyle=DASHES[index % len(DASHES)], linewidth=0.8, alpha=0.7)
        axes.scatter(x, y, marker=MARKERS[index % len(MARKERS)], color=colour, s=34, label=label, zorder=3)
        for point in members:
            if point.low is not None and point.high is not None:
                low = max(point.low, smallest / 2) if log_y else point.low
                axes.plot([point.kv_bytes / 1e6] * 2, [low, point.high], color=colour, linewidth=1, marker="_")
    front = sorted((point for point in shown if point.on_front), key=lambda point: point.kv_bytes)
    if front:
        axes.scatter(
            [point.kv_bytes / 1e6 for point in front],
            [point.value for point in front],
            s=130,
            facecolors="none",
            edgecolors="black",
            linewidths=1,
            label="Pareto front",
        )
    if comparison.exact is not None and (not log_y or comparison.exact >= smallest):
        axes.axhline(comparison.exact, color="black", linewidth=0.8, linestyle=":", label="exact's value")
    axes.set_xscale("log")
    plain_log_axis(axes.xaxis)
    if log_y:
        axes.set_yscale("log")
        plain_log_axis(axes.yaxis)
    if comparison.higher_is_better and all(0 <= point.value <= 1 for point in points):
        axes.set_ylim(-0.05, 1.05)
    better = "higher" if comparison.higher_is_better else "lower"
    axes.set_xlabel("stored KV of a sample (MB)", fontsize=9)
    axes.set_ylabel(f"{comparison.measure}, {better} is better", fontsize=9)
    axes.set_title(title, fontsize=9, wrap=True)
    axes.grid(alpha=0.3)
    picture.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    alt = f"{comparison.measure} against stored megabytes, {better} is better. " + "; ".join(
        f"{point.method}: {point.value:.4g} at {point.kv_bytes / 1e6:.2f} MB" for point in points
    )
    caption = (
        "Bars are 95 % bootstrap intervals of the paired difference to exact."
        if any(point.low is not None for point in points)
        else "No intervals: too few samples."
    )
    if len(shown) < len(points):
        hidden = ", ".join(point.method for point in points if point not in shown)
        caption += f" On a logarithmic axis 0 has no place: {hidden}."
    return Figure(name, alt, caption, to_png(picture))


def heat_maps(name: str, title: str, grids: Mapping[str, tuple[list[int], list[float], np.ndarray]]) -> Figure:
    """For each method a grid of mean scores, depths down and lengths across; NaN where there was no sample."""
    columns = 2 if len(grids) > 1 else 1
    rows = math.ceil(len(grids) / columns)
    deepest = max(len(depths) for _, depths, _ in grids.values())
    picture, axes = drawing(rows, columns, height=0.7 + rows * (0.75 + 0.24 * deepest))
    for panel, (method, (lengths, depths, scores)) in zip(axes, grids.items(), strict=False):
        panel.imshow(scores, vmin=0, vmax=1, cmap="Greys_r", aspect="auto")
        for (row, column), score in np.ndenumerate(scores):
            colour = "black" if math.isnan(score) or score > 0.5 else "white"
            text = "–" if math.isnan(score) else f"{score:.2f}"
            panel.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
        panel.set_xticks(range(len(lengths)), [str(length) for length in lengths])
        panel.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        panel.set_title(_wrapped(method, 34 if columns == 2 else 70), fontsize=8)
        panel.spines[:].set_visible(True)
    for panel in axes[len(grids) :]:
        panel.set_axis_off()
    picture.supxlabel("length of the prompt (tokens)", fontsize=9)
    picture.supylabel("depth of the answer", fontsize=9)
    alt = f"{title}. Mean scores over all depths by length. " + "; ".join(
        f"{method}: "
        + ", ".join(f"{length} tokens {_mean(scores[:, place]):.2f}" for place, length in enumerate(lengths))
        for method, (lengths, _, scores) in grids.items()
    )
    return Figure(name, alt, "White is 1, every answer right; black is 0. A dash: no sample there.", to_png(picture))


def kept_map(name: str, method: str, kept: Sequence[np.ndarray], prefix: int) -> Figure:
    """Which positions each layer and KV head kept: rows are heads, layer by layer, columns positions."""
    masks = np.concatenate([_mask(positions, prefix) for positions in kept])
    block = math.ceil(prefix / WIDEST_MAP)
    padded = np.pad(masks, ((0, 0), (0, -prefix % block)), constant_values=np.nan)
    shares = np.nanmean(padded.reshape(len(masks), -1, block), axis=2)
    picture, (axes,) = drawing(height=2.6)
    axes.imshow(
        1 - shares,
        vmin=0,
        vmax=1,
        cmap="Greys_r",
        aspect="auto",
        interpolation="nearest",
        extent=(0, prefix, len(kept), 0),
    )
    axes.set_xlabel("position in the prompt (tokens)", fontsize=9)
    axes.set_ylabel("layer, its KV heads apart", fontsize=8)
    step = math.ceil(len(kept) / 6)
    axes.set_yticks([layer + 0.5 for layer in range(0, len(kept), step)], [str(n) for n in range(0, len(kept), step)])
    axes.set_title(_wrapped(method, 70), fontsize=9)
    total = float(np.nanmean(masks))
    thirds = [float(np.nanmean(part)) for part in np.array_split(masks, 3, axis=1)]
    alt = (
        f"Positions of the prompt that {method} kept, by layer and KV head: {total:.1%} of all; of the first third "
        f"of the prompt {thirds[0]:.1%}, of the second {thirds[1]:.1%}, of the last {thirds[2]:.1%}."
    )
    return Figure(name, alt, f"Black was kept ({total:.1%} of the positions), white evicted.", to_png(picture))


def divergence_figures(name: str, lines: Mapping[str, np.ndarray]) -> list[Figure]:
    """KL of each scored token, its mean over samples, smoothed over 8 tokens; a figure a family, with equal axes."""
    methods = list(lines)
    curves = {method: _smoothed(values) for method, values in lines.items()}
    values = [value for _, y in curves.values() for value in y]
    found = []
    for label, members in _by_family(methods).items():
        own = {methods[place]: curves[methods[place]] for place in members}
        picture, (axes,) = drawing(height=2.4 + 0.17 * len(own))
        plot_lines(axes, own, "token after the compressed prefix", "KL to exact (nats)", log_y=True)
        axes.set_ylim(min(values) / 1.5, max(values) * 1.5)
        picture.legend(loc="outside upper left", ncols=1, fontsize=8, frameon=False)
        alt = f"KL to exact along the scored tokens for {label}, means of the first and the last quarter: " + "; ".join(
            f"{method} {_mean(y[: max(1, len(y) // 4)]):.3g} and {_mean(y[-max(1, len(y) // 4) :]):.3g} nats"
            for method, y in ((method, lines[method]) for method in own)
        )
        found.append(
            Figure(f"{name}-{len(found)}", alt, f"{label}: mean over samples, over 8 tokens.", to_png(picture))
        )
    return found


def time_figure(name: str, times: Mapping[str, Mapping[int, tuple[float, float, float]]]) -> Figure:
    """Quartiles of the decode time over exact's against the length of the prefix; with one length, a bar a method."""
    lengths = sorted({length for each in times.values() for length in each})
    label = "time of one step over exact's"
    if len(lengths) > 1:
        picture, (axes,) = drawing(height=4.2)
        curves = {method: (list(each), [middle for _, middle, _ in each.values()]) for method, each in times.items()}
        ends = {method: [(low, high) for low, _, high in each.values()] for method, each in times.items()}
        plot_lines(axes, curves, "tokens in the prefix", label, log_x=True, spreads=ends)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.minorticks_off()
        axes.axhline(1, color="black", linestyle=":", linewidth=1)
        picture.legend(loc="outside lower center", ncols=1, fontsize=8, frameon=False)
    else:
        picture, (axes,) = drawing(height=0.9 + 0.27 * len(times))
        values = [each[lengths[0]] for each in times.values()]
        axes.barh(range(len(times)), [middle for _, middle, _ in values], color="white", edgecolor="black", height=0.6)
        for row, (low, middle, high) in enumerate(values):
            axes.plot([low, high], [row, row], color="black", marker="|", linewidth=1)
            axes.text(max(middle, high), row, f"  {middle:.2f}", va="center", fontsize=8)
        axes.axvline(1, color="black", linestyle=":", linewidth=1)
        axes.set_yticks(range(len(times)), [_wrapped(method, 30) for method in times], fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel(f"{label}, behind {lengths[0]} tokens", fontsize=9)
    alt = "Time of one decode step over exact's, median and quartiles: " + "; ".join(
        f"{method} "
        + ", ".join(
            f"{mid:.2f} ({low:.2f}–{high:.2f}) behind {length} tokens" for length, (low, mid, high) in each.items()
        )
        for method, each in times.items()
    )
    caption = "Median of steps taken in turns with exact's; lines are quartiles. Dotted: exact's."
    return Figure(name, alt, caption, to_png(picture))


def streaming_figure(name: str, measure: str, records: Sequence[StreamRecord]) -> Figure:
    """`ppl`, `kv_bytes` or `ms_per_call` of each bucket against the tokens fed so far."""
    label, scale = MEASURES[measure]
    groups = by_method(records)
    lines = {method: curve(group, measure, scale) for method, group in groups.items()}
    quartiles = spreads(groups) if measure == "ms_per_call" else {}
    picture, (axes,) = drawing(height=3.1 + 0.17 * len(lines))
    plot_lines(axes, lines, "tokens fed", label, log_y=True, spreads=quartiles)
    picture.legend(loc="outside lower center", ncols=1, fontsize=8, frameon=False)

    def shown(method: str, place: int) -> str:
        value = f"{lines[method][1][place]:.4g}"
        if method not in quartiles:
            return value
        low, high = quartiles[method][place]
        return f"{value} ({low:.4g}–{high:.4g})"

    alt = f"{label} along the text, first and last bucket: " + "; ".join(
        f"{method} {shown(method, 0)} and {shown(method, -1)} (largest {np.nanmax(y):.4g})"
        for method, (_, y) in lines.items()
    )
    caption = f"{label[0].upper()}{label[1:]} against the tokens fed so far."
    if quartiles:
        caption += " Medians of each bucket; upright lines are quartiles."
    return Figure(name, alt, caption, to_png(picture))


def _by_family(methods: Sequence[str]) -> dict[str, list[int]]:
    """The places of each family's methods."""
    found: dict[str, list[int]] = {}
    for place, method in enumerate(methods):
        found.setdefault(family(method), []).append(place)
    return found


def _mask(positions: np.ndarray, prefix: int) -> np.ndarray:
    """Which of the first `prefix` positions each head kept: [H, prefix] of 0 and 1."""
    mask = np.zeros((len(positions), prefix))
    for head, own in enumerate(positions):
        mask[head, own[(own >= 0) & (own < prefix)]] = 1
    return mask


def _smoothed(values: np.ndarray, width: int = 8) -> tuple[list[int], list[float]]:
    width = min(width, len(values))
    means = np.convolve(values, np.ones(width) / width, mode="valid")
    return list(range(width, len(values) + 1)), np.maximum(means, 1e-8).tolist()


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if not np.isnan(values).all() else math.nan


def _wrapped(text: str, width: int) -> str:
    """A method's text on several lines, broken behind commas and bars."""
    lines = [""]
    for part in text.replace(", ", ",\n").replace(" | ", " |\n").split("\n"):
        if lines[-1] and len(lines[-1]) + len(part) + 1 > width:
            lines.append(part)
        else:
            lines[-1] = f"{lines[-1]} {part}".strip()
    return "\n".join(lines)
