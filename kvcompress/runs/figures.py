"""How figures look: narrow enough for a phone, and told apart without colour."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

WIDTH = 5.2
"""Inches. At 400 pixels of screen the text of 9 points is still about 9 pixels high."""

MARKERS = "os^Dv*Xp<>hP8d"
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#666666")
"""Okabe and Ito's palette, which is told apart with any kind of colour vision."""


def drawing(rows: int = 1, columns: int = 1, height: float = 3.6, **options: Any) -> tuple[Figure, list[Axes]]:
    """An empty figure of `rows` x `columns` axes, given row by row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots(rows, columns, squeeze=False, **options)
    flat = [each for row in axes for each in row]
    for each in flat:
        each.tick_params(labelsize=8)
    return picture, flat


def style(index: int) -> dict[str, Any]:
    """Marker, dash and colour of line number `index`; the first 14 differ in their markers alone."""
    return {
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)],
        "color": COLOURS[index % len(COLOURS)],
    }


def plot_lines(
    axes: Axes,
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    spreads: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> None:
    """Each of `lines`, by name its x and y values, in a style of its own.

    At each x of a line in `spreads` an upright line goes from its lower to its upper end.
    """
    for index, (name, (x, y)) in enumerate(lines.items()):
        if spreads is not None and name in spreads:
            axes.vlines(x, *zip(*spreads[name], strict=True), color=COLOURS[index % len(COLOURS)], linewidth=1)
        every = max(1, len(x) // 8)  # markers on every point of a long line would hide it
        axes.plot(x, y, label=name, markersize=5, linewidth=1.2, markevery=(index % every, every), **style(index))
    axes.set_xlabel(x_label, fontsize=9)
    axes.set_ylabel(y_label, fontsize=9)
    if log_x:
        axes.set_xscale("log")
        plain_log_axis(axes.xaxis)
    values = [value for _, y in lines.values() for value in y if math.isfinite(value)]
    if log_y and values and 0 < min(values) < max(values):
        axes.set_yscale("log")
        plain_log_axis(axes.yaxis)
    axes.grid(alpha=0.3)


def plain_log_axis(axis: Axis) -> None:
    """Labels a logarithmic axis with plain numbers at 1, 2 and 5 times the powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=9))
    axis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def to_png(picture: Figure) -> bytes:
    """The figure as PNG, sharp in print."""
    out = io.BytesIO()
    picture.savefig(out, format="png", dpi=170)
    return out.getvalue()
