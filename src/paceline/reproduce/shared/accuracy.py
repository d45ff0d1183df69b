"""Trainings that are judged by the accuracy on the test set."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.reproduce.shared.rows import PlotLine
from paceline.reproduce.shared.runs import Run, Trained


@dataclass(frozen=True)
class AccuracyCase:
    """A network on a cluster. Its accuracy is tested every few rounds."""

    title: str
    template: Run  # everything except the scheme and the seed
    targets: tuple[float, ...]  # accuracies on the test set
    missing: tuple[str, ...] = ()


def accuracy_line(trained: Trained, name: str) -> PlotLine:
    """Return the accuracy over time, for a plot."""
    points = sorted(trained.learned.accuracy.items())
    return PlotLine(name, tuple(trained.seconds[at] for at, _ in points), tuple(value for _, value in points))
