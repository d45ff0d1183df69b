"""A plot as SVG that can stand in a page: it takes the page's colour of text, and refers to nothing outside."""

from __future__ import annotations

import io
import math
import re
from typing import Any

from paceline.reproduce.shared.rows import Plot, PlotLine

#: Readable on white and on black.
COLOURS = ("#3b7dd8", "#e07b39", "#4aa564", "#c65fb0", "#b8912b", "#7d6bd6", "#2fa3b0", "#d0555a")
DASHES = ("-", "--", ":", "-.")  # once all colours have been used
INK = "#010203"  # stands for the page's colour until all is drawn
STYLE: dict[Any, Any] = {  # matplotlib names every key that there is as a type of its own
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
ABREAST = 60  # letters that fit side by side under bars; where there are more, the bars lie
NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}


def can_draw() -> bool:
    """Is matplotlib installed?"""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def svg(plot: Plot, name: str) -> str:
    """The plot as an <svg> element. `name` must differ from that of any other on the same page."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}):
        lying = plot.kind == "bars" and sum(map(len, _words(plot))) > ABREAST
        height = 0.9 + 0.3 * len(_words(plot)) if lying else 3.6
        if plot.kind == "cells":
            height = 1.0 + 0.24 * len(plot.lines)
        named = len(plot.lines) > 1 and plot.kind != "cells"
        figure = Figure(figsize=(6.4, height + named * 0.2 * math.ceil(len(plot.lines) / 3)), layout="constrained")
        axis = figure.subplots()
        if plot.kind == "bars":
            _bars(axis, plot, lying)
        elif plot.kind == "spans":
            _spans(axis, plot)
        elif plot.kind == "cells":
            _cells(axis, plot)
        else:
            _curves(axis, plot)
        axis.set_title(plot.title, loc="left", fontsize=11)
        axis.set_xlabel(plot.y if lying else plot.x)
        axis.set_ylabel(plot.x if lying else plot.y)
        axis.spines[["top", "right"]].set_visible(False)
        if named:
            beside = 3 if max(len(line.name) for line in plot.lines) <= 18 else 2
            figure.legend(loc="outside lower center", ncols=beside, frameon=False, fontsize=9)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata=NO_METADATA)
    return _for_a_page(file.getvalue())


def _curves(axis: Any, plot: Plot) -> None:
    for at, line in enumerate(plot.lines):
        # Each is thinner than the one before, so that both show where they run on top of one another.
        later = (len(plot.lines) - 1 - at) / max(len(plot.lines) - 1, 1)
        look: dict[str, Any] = {"color": _colour(at), "linestyle": _dashes(at), "label": line.name}
        look["linewidth"] = 1.2 + 2.4 * later
        if plot.kind == "steps":
            axis.step(line.x, _gaps(line), where="post", **look)
        else:
            axis.plot(line.x, _gaps(line), marker="o" if len(line.x) <= 20 else "", markersize=3, **look)
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
    """A heat map: a line is a row; the darker a cell, the larger its value. Where there is none, there is a dash."""
    from matplotlib.colors import LogNorm

    words = _words(plot)
    table = [[dict(zip(map(str, line.x), line.y, strict=True)).get(word) for word in words] for line in plot.lines]
    values = [value for row in table for value in row if value is not None] or [1.0]
    norm = LogNorm(max(min(values), 1e-9), max(*values, min(values) * 1.001))
    for down, row in enumerate(table):
        for across, value in enumerate(row):
            shade = 0.0 if value is None else 0.15 + 0.75 * float(norm(value))
            axis.barh(down, 0.96, 0.92, across - 0.48, color=(*_rgb(COLOURS[1]), shade))
            axis.text(across, down, "–" if value is None else f"{value:.3g}", ha="center", va="center", fontsize=8)
    axis.set_yticks(range(len(table)), [line.name for line in plot.lines], fontsize=8)
    axis.set_xticks(range(len(words)), words)
    axis.set_ylim(len(table) - 0.5, -0.5)
    axis.tick_params(length=0)


def _rgb(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return red, green, blue


def _bars(axis: Any, plot: Plot, lying: bool) -> None:
    """Sets of bars side by side, over all the words that any of them has; lying ones beneath one another, with values.

    Where there is no value, there is a dash.
    """
    words = _words(plot)
    width = 0.8 / max(len(plot.lines), 1)
    for at, line in enumerate(plot.lines):
        heights = {str(x): y for x, y in zip(line.x, line.y, strict=True)}
        left = width * (at - (len(plot.lines) - 1) / 2)
        places = [(place + left, heights.get(word)) for place, word in enumerate(words)]
        there = [(place, y) for place, y in places if y is not None]
        look: dict[str, Any] = {"color": _colour(at), "label": line.name}
        draw = axis.barh if lying else axis.bar
        bars = draw([place for place, _ in there], [y for _, y in there], 0.92 * width, **look)
        if lying:
            axis.bar_label(bars, fmt="{:.4g}", padding=3, fontsize=9)
        for place, y in places:
            if y is None:
                axis.annotate("–", (0, place) if lying else (place, 0), (3, 3), textcoords="offset points", va="center")
    if lying:
        axis.set_yticks(range(len(words)), words)
        axis.invert_yaxis()
        axis.margins(x=0.12)
    else:
        axis.set_xticks(range(len(words)), words)


def _words(plot: Plot) -> list[str]:
    """What bars stand over."""
    return list(dict.fromkeys(str(x) for line in plot.lines for x in line.x))


def _gaps(line: PlotLine) -> list[float]:
    """Where there is no value, the curve is broken."""
    return [math.nan if y is None else y for y in line.y]


def _colour(at: int) -> str:
    return COLOURS[at % len(COLOURS)]


def _dashes(at: int) -> str:
    return DASHES[at // len(COLOURS) % len(DASHES)]


def _for_a_page(text: str) -> str:
    """Without what belongs to a file of its own: header, size, fonts, name spaces, and rules for everything."""
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'\s(width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r"font-family: [^;\"]*; ", "", text)
    used = set(re.findall(r"#(\w+)", text))
    text = re.sub(r'\sid="([^"]*)"', lambda found: found[0] if found[1] in used else "", text)
    return text.replace(INK, "currentColor").strip()
