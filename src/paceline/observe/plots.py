"""Plots of a run: when each worker computes, pushes, waits and pulls, and the use of the servers' links."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.observe.trace import Arrived, Cancelled, Computed, Event, Granted, Left, Pulled, Pulling, Pushing, Used

COLOURS = {"computing": "#3b7dd8", "pushing": "#e07b39", "pulling": "#4aa564", "waiting": "#d9d9d9"}
MAX_WORKERS = 64

#: What a worker does after each event.
_ACTIVITY_AFTER = {
    Granted: "waiting",
    Pulling: "pulling",
    Pulled: "computing",
    Computed: "waiting",
    Pushing: "pushing",
    Arrived: "waiting",
    Cancelled: "waiting",
}


@dataclass
class Panel:
    """The part of a plot that shows the end of one run."""

    title: str
    workers: int
    iteration_seconds: float = 0.0
    events: deque[Event] = field(default_factory=deque)

    def __post_init__(self) -> None:
        # About ten rounds of events, which bounds the memory; a plot shows two or three.
        self.events = deque(maxlen=100 * self.workers)


def draw(panels: list[Panel], path: Path) -> None:
    """Draw the panels one below the other on the same time scale, and write them to a PNG file."""
    from matplotlib.figure import Figure

    seconds = 2.5 * max(panel.iteration_seconds for panel in panels)
    rows = [min(panel.workers, MAX_WORKERS) for panel in panels]
    ratios = [height for n in rows for height in (max(1.6, 0.16 * n), 0.8)]
    figure = Figure(figsize=(11, sum(ratios) + 0.9 * len(panels)), layout="constrained")
    axes: Any = figure.subplots(2 * len(panels), 1, sharex=True, height_ratios=ratios, squeeze=False)[:, 0]
    for i, panel in enumerate(panels):
        _draw_workers(axes[2 * i], panel, seconds)
        _draw_links(axes[2 * i + 1], panel, seconds)
    axes[0].set_xlim(0, seconds)
    axes[-1].set_xlabel("seconds")
    handles = [_patch(colour) for colour in COLOURS.values()]
    figure.legend(handles, COLOURS, loc="outside upper right", ncols=4, frameon=False)
    figure.savefig(path, dpi=130, format="png")


def draw_curves(curves: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str, path: Path) -> None:
    """Draw named curves, each a sequence of points (x, y), and write them to a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    for name, points in curves.items():
        axis.plot([at for at, _ in points], [value for _, value in points], label=name)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=130, format="png")


def intervals(panel: Panel, seconds: float) -> tuple[float, dict[int, list[tuple[float, float, str]]]]:
    """Return the start of the window, and for each worker its activities as (from, to, activity).

    The times of the activities are in seconds since the start of the window, which is the last `seconds` of the panel.
    """
    end = panel.events[-1].time if panel.events else 0.0
    start = max(end - seconds, panel.events[0].time if panel.events else 0.0)
    doing: dict[int, tuple[float, str]] = {}
    done: dict[int, list[tuple[float, float, str]]] = {}
    for event in panel.events:
        if isinstance(event, Left):
            activity = None
        elif (activity := _ACTIVITY_AFTER.get(type(event))) is None:
            continue
        worker: int = event.worker  # type: ignore[union-attr]
        if worker in doing:
            since, what = doing[worker]
            if event.time > max(since, start):
                done.setdefault(worker, []).append((max(since, start) - start, event.time - start, what))
        if activity is None:
            doing.pop(worker, None)
        else:
            doing[worker] = (event.time, activity)
    for worker, (since, what) in doing.items():
        if end > max(since, start):
            done.setdefault(worker, []).append((max(since, start) - start, end - start, what))
    return start, done


def _draw_workers(axis: Any, panel: Panel, seconds: float) -> None:
    _, done = intervals(panel, seconds)
    for worker, spans in done.items():
        if worker >= MAX_WORKERS:
            continue
        for what, colour in COLOURS.items():
            bars = [(since, until - since) for since, until, kind in spans if kind == what]
            axis.broken_barh(bars, (worker - 0.4, 0.8), facecolor=colour)
    shown = min(panel.workers, MAX_WORKERS)
    note = f" (the first {shown} of {panel.workers} workers)" if shown < panel.workers else ""
    axis.set_title(f"{panel.title}: {panel.iteration_seconds:.3g} s per iteration{note}", loc="left", fontsize=11)
    axis.set_ylim(shown - 0.4, -0.6)
    axis.set_yticks(range(0, shown, max(1, shown // 8)))
    axis.set_ylabel("worker")
    axis.spines[["top", "right"]].set_visible(False)


def _draw_links(axis: Any, panel: Panel, seconds: float) -> None:
    start, _ = intervals(panel, seconds)
    for direction, colour, width in (
        ("in", "pushing", 4.0),
        ("out", "pulling", 1.4),
    ):  # widths that show both lines where they coincide
        times, uses, now = [0.0], [0.0], 0.0
        for event in panel.events:
            if isinstance(event, Used) and event.direction == direction:
                now = event.fraction
                if event.time < start:
                    uses[0] = now
                else:
                    times.append(event.time - start)
                    uses.append(now)
        times.append(panel.events[-1].time - start if panel.events else 0.0)
        uses.append(now)
        axis.step(times, uses, where="post", color=COLOURS[colour], label=direction, linewidth=width)
    axis.set_ylim(-0.05, 1.1)
    axis.set_yticks([0, 1], ["0", "full"])
    axis.set_ylabel("servers'\nlinks")
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _patch(colour: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour)
