"""The live view of a running job: a table for a terminal, or a line for a log.

`Live` holds the state that both show. A table shows only as many workers as there is room for.
"""

from __future__ import annotations

import heapq
import math

from rich import box
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.observe.live_state import Live, State

STYLES: dict[State, str] = {"computing": "blue", "waiting": "yellow", "pushing": "green", "left": "dim"}


def line(live: Live, now: float | None = None) -> str:
    """Return the state of the job as one plain line for a log. It leaves out what is unknown.

    now: the time to show; that of the last event by default.
    """
    now = live.time if now is None else now
    policy = [live.policy] if live.policy else []
    figures = [*_figures(live, now), *_measures(live), *_progress(live, now)]
    return "  ".join([f"{live.seconds(now):.1f} s", *policy, *figures])


def table(live: Live, height: int = 24, now: float | None = None) -> RenderableType:
    """Return the state of the job and of the workers that fit in `height` lines; at least one worker is shown.

    now: the time to show; that of the last event by default.
    """
    now = live.time if now is None else now
    title = "  ".join(
        [
            *([live.policy] if live.policy else []),
            attendance(live),
            f"version {live.version:,}",
            f"{live.seconds(now):.1f} s",
        ]
    )
    lines = (_figures(live, now), _measures(live))
    parts: list[RenderableType] = [Text(title, style="bold", no_wrap=True, overflow="ellipsis")]
    parts += [Text("  ".join(line), no_wrap=True, overflow="ellipsis") for line in lines if line]
    share = live.progress()
    if share is not None:
        bar = Table.grid(padding=(0, 2))
        bar.add_row(ProgressBar(total=1.0, completed=share, width=40), Text("".join(_progress(live, now))))
        parts.append(bar)
    room = max(1, height - len(parts) - 2)  # two lines are for the headings and the rule below them
    if len(live.workers) > room:
        room = max(1, room - 1)
    parts.append(_workers(live, room, now))
    hidden = len(live.workers) - room
    if hidden > 0:
        parts.append(Text(f"and {hidden:,} more", style="dim"))
    return Group(*parts)


def attendance(live: Live) -> str:
    """Return how many workers there are, and how many the job waits for before it begins."""
    here = _counted(live.members + live.joined_early)
    more = f"{live.missing:,} more" if live.joined_early else _counted(live.missing)
    return f"{here}, waiting for {more}" if live.missing else here


def _counted(workers: int) -> str:
    return f"{workers:,} worker" + ("" if workers == 1 else "s")


def _workers(live: Live, limit: int, now: float) -> Table:
    """Return a table of the first `limit` workers."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
    for heading in ("worker", "state", "iteration", live.rate_unit, "waiting", "staleness", "loss"):
        shown.add_column(heading, justify="left" if heading == "state" else "right", no_wrap=True)
    for number in heapq.nsmallest(limit, list(live.workers)):  # a copy, because another thread may add a worker
        worker = live.workers[number]
        gone = worker.state == "left"
        shown.add_row(
            str(number),
            Text(worker.state, style=STYLES[worker.state]),
            f"{worker.iteration:,}",
            "" if gone else f"{worker.samples_per_second(now):,.0f}",
            "" if gone else f"{worker.waiting_share(now):.0%}",
            "" if worker.staleness is None else str(worker.staleness),
            "" if worker.loss is None else f"{worker.loss:.3g}",
            style="dim" if gone else None,
        )
    return shown


def _figures(live: Live, now: float) -> list[str]:
    """Return the known figures of the whole job."""
    figures = [
        f"{live.updates:,} update{'' if live.updates == 1 else 's'}",
        f"{live.samples_per_second(now):,.0f} {live.rate_unit}",
        f"waiting {live.waiting_share(now):.0%}",
    ]
    if live.done and not live.total:  # the share of the job that is done is unknown
        figures.append(f"epoch {live.epoch + 1}")
    staleness = live.staleness()
    if staleness is not None:
        figures.append(f"staleness {staleness:.1f}")
    return figures


def _measures(live: Live) -> list[str]:
    """Return the loss and the metrics, as far as they are known."""
    loss = [] if live.loss is None else [f"loss {live.loss:.3g}"]
    return loss + [f"{name} {value:.3g}" for name, value in list(live.metrics.items())]


def _progress(live: Live, now: float) -> list[str]:
    """Return how much of the job is done and how long the rest takes, as far as that is known."""
    share, seconds = live.progress(), live.seconds_left(now)
    if share is None:
        return []
    done = f"{math.floor(100 * share)}% done"  # rounded down, so that 100% means all of it
    return [done if seconds is None or share >= 1 else f"{done}, {_rounded(seconds)} left"]


def _rounded(seconds: float) -> str:
    """Return an estimated time in a suitable unit."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
