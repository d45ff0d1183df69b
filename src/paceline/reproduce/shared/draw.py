"""Draws a plot as SVG for an HTML page. It takes the page's text colour and refers to nothing outside the page."""

from __future__ import annotations

import io
import math
import re
from typing import Any

from paceline.reproduce.shared.rows import Plot, PlotLine

#: Colours that are readable on white and on black.
COLOURS = ("#3b7dd8", "#e07b39", "#4aa564", "#c65fb0", "#b8912b", "#7d6bd6", "#2fa3b0", "#d0555a")
DASHES = ("-", "--", ":", "-.")  # the next one is used each time the colours start over
INK = "#010203"  # a placeholder, replaced by the page's text colour at the end
STYLE: dict[Any, Any] = {  # Any: matplotlib types its keys as a long Literal
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,
    "font.size": 10.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
MAX_LABEL_CHARACTERS = 60  # under vertical bars; with more, the bars are horizontal
NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def svg(plot: Plot, name: str) -> str:
    """Return the plot as an <svg> element. `name` must be unique within the page."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}):
        horizontal = plot.kind == "bars" and sum(map(len, _categories(plot))) > MAX_LABEL_CHARACTERS
        height = 0.9 + 0.3 * len(_categories(plot)) if horizontal else 3.6
        if plot.kind == "cells":
            height = 1.0 + 0.24 * len(plot.lines)
        has_legend = len(plot.lines) > 1 and plot.kind != "cells"
        figure = Figure(figsize=(6.4, height + has_legend * 0.2 * math.ceil(len(plot.lines) / 3)), layout="constrained")
        axis = figure.subplots()
        if plot.kind == "bars":
            _bars(axis, plot, horizontal)
        elif plot.kind == "spans":
            _spans(axis, plot)
        elif plot.kind == "cells":
            _cells(axis, plot)
        else:
            _curves(axis, plot)
        axis.set_title(plot.title, loc="left", fontsize=11)
        axis.set_xlabel(plot.y if horizontal else plot.x)
        axis.set_ylabel(plot.x if horizontal else plot.y)
        axis.spines[["top", "right"]].set_visible(False)
        if has_legend:
            columns = 3 if max(len(line.name) for line in plot.lines) <= 18 else 2
            figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata=NO_METADATA)
    return _embeddable(file.getvalue())


def _curves(axis: Any, plot: Plot) -> None:
    for at, line in enumerate(plot.lines):
        # Each curve is thinner than the one before it, so that both are visible where they coincide.
        below = (len(plot.lines) - 1 - at) / max(len(plot.lines) - 1, 1)
        look: dict[str, Any] = {"color": _colour(at), "linestyle": _dashes(at), "label": line.name}
        look["linewidth"] = 1.2 + 2.4 * below
        if plot.kind == "steps":
            axis.step(line.x, _with_nan(line), where="post", **look)
        else:
            axis.plot(line.x, _with_nan(line), marker="o" if len(line.x) <= 20 else "", markersize=3, **look)
    if plot.log:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())


def _spans(axis: Any, plot: Plot) -> None:
    for at, line in enumerate(plot.lines):
        axis.hlines(line.y[::2], line.x[::2], line.x[1::2], color=_colour(at), linewidth=1.5, label=line.name)
    axis.margins(x=0)


def _cells(axis: Any, plot: Plot) -> None:
    """Draw a heat map with a row per line. A darker cell has a larger value; a missing value is a dash."""
    from matplotlib.colors import LogNorm

    categories = _categories(plot)
    table = [
        [dict(zip(map(str, line.x), line.y, strict=True)).get(category) for category in categories]
        for line in plot.lines
    ]
    values = [value for row in table for value in row if value is not None] or [1.0]
    norm = LogNorm(max(min(values), 1e-9), max(*values, min(values) * 1.001))
    for down, row in enumerate(table):
        for across, value in enumerate(row):
            shade = 0.0 if value is None else 0.15 + 0.75 * float(norm(value))
            axis.barh(down, 0.96, 0.92, across - 0.48, color=(*_rgb(COLOURS[1]), shade))
            axis.text(across, down, "–" if value is None else f"{value:.3g}", ha="center", va="center", fontsize=8)
    axis.set_yticks(range(len(table)), [line.name for line in plot.lines], fontsize=8)
    axis.set_xticks(range(len(categories)), categories)
    axis.set_ylim(len(table) - 0.5, -0.5)
    axis.tick_params(length=0)


def _rgb(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return red, green, blue


def _bars(axis: Any, plot: Plot, horizontal: bool) -> None:
    """Draw the sets of bars side by side, over the categories of all sets. A missing value is a dash.

    Horizontal bars are labelled with their values.
    """
    categories = _categories(plot)
    width = 0.8 / max(len(plot.lines), 1)
    for at, line in enumerate(plot.lines):
        heights = {str(x): y for x, y in zip(line.x, line.y, strict=True)}
        left = width * (at - (len(plot.lines) - 1) / 2)
        places = [(place + left, heights.get(category)) for place, category in enumerate(categories)]
        present = [(place, y) for place, y in places if y is not None]
        look: dict[str, Any] = {"color": _colour(at), "label": line.name}
        draw = axis.barh if horizontal else axis.bar
        bars = draw([place for place, _ in present], [y for _, y in present], 0.92 * width, **look)
        if horizontal:
            axis.bar_label(bars, fmt="{:.4g}", padding=3, fontsize=9)
        for place, y in places:
            if y is None:
                axis.annotate(
                    "–", (0, place) if horizontal else (place, 0), (3, 3), textcoords="offset points", va="center"
                )
    if horizontal:
        axis.set_yticks(range(len(categories)), categories)
        axis.invert_yaxis()
        axis.margins(x=0.12)
    else:
        axis.set_xticks(range(len(categories)), categories)


def _categories(plot: Plot) -> list[str]:
    """Return the categories along x, in the order in which the lines name them."""
    return list(dict.fromkeys(str(x) for line in plot.lines for x in line.x))


def _with_nan(line: PlotLine) -> list[float]:
    """Return the line's values with NaN for those that are missing, which interrupts the curve."""
    return [math.nan if y is None else y for y in line.y]


def _colour(at: int) -> str:
    return COLOURS[at % len(COLOURS)]


def _dashes(at: int) -> str:
    return DASHES[at // len(COLOURS) % len(DASHES)]


def _embeddable(text: str) -> str:
    """Remove what only a stand-alone SVG file needs: header, size, fonts, namespaces, style sheet and unused ids."""
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'\s(width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r"font-family: [^;\"]*; ", "", text)
    used = set(re.findall(r"#(\w+)", text))
    text = re.sub(r'\sid="([^"]*)"', lambda found: found[0] if found[1] in used else "", text)
    return text.replace(INK, "currentColor").strip()
