"""A plot of a metric over time, with one line for each policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.observe.metric_history import Curve, Target

FORMATS = (".png", ".svg", ".pdf")
COLOURS = ("#e07b39", "#3b7dd8", "#4aa564", "#8a5cc2", "#b0413e", "#6b6b6b")


def draw_metric(curves: Mapping[str, Curve], metric: str, target: Target | None, title: str, path: Path) -> None:
    """Draw the curve of each policy, and the target with the time at which each policy reached it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis: Any = figure.subplots()
    for number, (policy, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        axis.plot([at for at, _ in curve], [value for _, value in curve], color=colour, label=policy, linewidth=1.8)
        reached = target.seconds({metric: curve}) if target else None
        if target and reached is not None:
            axis.plot([reached, reached], [0, target.value], color=colour, linewidth=0.8, linestyle=":")
            axis.plot([reached], [target.value], "o", color=colour)
            note = {"xytext": (6, -14), "textcoords": "offset points", "color": colour, "fontweight": "bold"}
            axis.annotate(f"{reached:.1f} s", (reached, target.value), **note)
    if target:
        axis.axhline(target.value, color="#9a9a9a", linewidth=0.8, zorder=0)
        axis.annotate(str(target), (0.005, target.value), xycoords=("axes fraction", "data"), va="bottom", color="#777")
    values = [value for curve in curves.values() for _, value in curve]
    if metric == "accuracy" and values and min(values) >= 0 and max(values) <= 1:
        from matplotlib.ticker import PercentFormatter

        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        # Most of an accuracy's curve is close to its end, so the plot leaves out the first steep part.
        axis.set_ylim(max(0.0, max(values) - 0.45), min(1.01, max(values) + 0.02))
    axis.set_xlim(left=0)
    axis.set_xlabel("seconds")
    axis.set_ylabel(metric)
    axis.set_title(title, loc="left", fontsize=11)
    axis.legend(frameon=False, loc="lower right")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
