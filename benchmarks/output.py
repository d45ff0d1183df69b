"""Prints tables in Markdown, and draws plots into a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


class Output:
    """The tables and plots of the benchmarks. Without a folder it draws none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def table(self, title: str, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table."""
        print(f"\n### {title}\n")
        print("| " + " | ".join(headings) + " |")
        print("|" + "---|" * len(headings))
        for row in rows:
            print("| " + " | ".join(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row) + " |")

    def lines(self, name: str, x: str, y: str, curves: Mapping[str, Sequence[tuple[object, float]]]) -> None:
        """Draw curves, each a list of points (x, y)."""

        def draw(figure: Any) -> None:
            axis = figure.subplots()
            for label, points in curves.items():
                axis.plot([str(at) for at, _ in points], [value for _, value in points], "o-", label=label)
            axis.set_xlabel(x)
            axis.set_ylabel(y)
            axis.set_ylim(0)
            axis.legend(frameon=False)

        self.figure(name, draw)

    def figure(self, name: str, draw: Callable[[Any], None]) -> None:
        """Save a figure that `draw` fills, as lab-NAME.png."""
        if self._folder is None:
            return
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 3.6), layout="constrained")
        draw(figure)
        figure.savefig(self._folder / f"lab-{name}.png", dpi=110)
