"""What a running job looks like, from its events alone: a table for a terminal, or a line for a log.

Rates and shares are of the recent past, between one and two windows long. Nothing here costs more with more workers:
an event is a few additions, and a table shows no more workers than there is room for.
"""

from __future__ import annotations

import heapq
import math
from typing import Literal, NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.observe.observer import Observer
from paceline.observe.trace import Identity, identities

State = Literal["computing", "waiting", "pushing", "left"]

STYLES: dict[State, str] = {"computing": "blue", "waiting": "yellow", "pushing": "green", "left": "dim"}
SMOOTH = 50  # losses: the job's is the mean of about so many


class _Mark(NamedTuple):
    """Where a worker's counts stood."""

    time: float
    samples: int
    waited: float


class LiveWorker:
    """A worker as it looks now."""

    __slots__ = (
        "_window",
        "arrived_at",
        "incarnation",
        "iteration",
        "loss",
        "newer",
        "older",
        "samples",
        "staleness",
        "state",
        "waited",
        "waits_since",
    )

    def __init__(self, window: float) -> None:
        self._window = window
        self.samples = 0  # that have arrived
        self.waited = 0.0
        self.staleness: int | None = None  # of its update that was applied last
        self.loss: float | None = None  # the last it told
        self.come(0.0, 1)

    def come(self, time: float, incarnation: int) -> None:
        """It is a member, with nothing done yet in this incarnation."""
        self.incarnation = incarnation
        self.iteration = 0  # the one it is at
        self.state: State = "waiting"
        self.waits_since: float | None = None
        self.arrived_at = time
        self.older = self.newer = _Mark(time, self.samples, self.waited)

    def arrive(self, time: float, samples: int) -> None:
        self.samples += samples
        self.arrived_at = time
        # A mark is set only as an update arrives, so what lies between two of them are whole iterations.
        if time - self.newer.time >= self._window:
            self.older, self.newer = self.newer, _Mark(time, self.samples, self.waited)

    def stop_waiting(self, time: float) -> None:
        if self.waits_since is not None:
            self.waited += time - self.waits_since
            self.waits_since = None

    def samples_per_second(self, now: float) -> float:
        """Up to its last arrival; up to now if it is long overdue, so that who hangs is seen to slow down."""
        spent = self.arrived_at - self.older.time
        if now - self.arrived_at > max(self._window, spent):
            spent = now - self.older.time
        return _ratio(self.samples - self.older.samples, spent)

    def waiting_share(self, now: float) -> float:
        """The part of the recent time in which it waited for a Grant or a Turn."""
        waited = self.waited + (0.0 if self.waits_since is None else now - self.waits_since)
        return _ratio(waited - self.older.waited, now - self.older.time)


class _Integral:
    """A count, summed over time."""

    __slots__ = ("_since", "_total", "count")

    def __init__(self) -> None:
        self.count = 0
        self._total = self._since = 0.0

    def change(self, time: float, by: int) -> None:
        self._total, self._since = self.total(time), time
        self.count += by

    def total(self, now: float) -> float:
        return self._total + self.count * (now - self._since)


class _Sums(NamedTuple):
    """Where the job's counts stood."""

    time: float = 0.0
    samples: int = 0
    stale: int = 0
    stale_count: int = 0
    waiting_seconds: float = 0.0
    member_seconds: float = 0.0
    done: int = 0


class Live(Observer):
    """Keeps what a table or a line of a running job shows. A run that begins replaces the one before."""

    def __init__(self, policy: str = "", window: float = 10.0) -> None:
        """`policy` names the run where no `began` does; `window` is in seconds."""
        self.policy = policy
        self.window = window
        self._reset()

    def _reset(self) -> None:
        self.time = 0.0  # of the last event
        self.workers: dict[int, LiveWorker] = {}
        self.version = 0
        self.updates = 0  # accepted: applied or kept
        self.loss: float | None = None
        self.epoch = self.done = self.total = 0
        self._losses = 0
        self._samples = 0
        self._stale = self._stale_count = 0
        self._unsettled: dict[Identity, int] = {}  # samples of updates that are not decided yet
        self._waiting, self._members = _Integral(), _Integral()
        self._older = self._newer = _Sums()

    # What is seen now

    @property
    def members(self) -> int:
        return self._members.count

    def samples_per_second(self, now: float) -> float:
        """Samples that changed the model."""
        return _ratio(self._samples - self._older.samples, now - self._older.time)

    def waiting_share(self, now: float) -> float:
        """The part of all members' recent time in which they waited for a Grant or a Turn."""
        sums, older = self._sums(now), self._older
        return _ratio(sums.waiting_seconds - older.waiting_seconds, sums.member_seconds - older.member_seconds)

    def staleness(self) -> float | None:
        """The mean of recent updates; None where there were none."""
        count = self._stale_count - self._older.stale_count
        return (self._stale - self._older.stale) / count if count else None

    def progress(self) -> float | None:
        """From 0 to 1; None where nobody says how much there is to do."""
        return self.done / self.total if self.total else None

    def seconds_left(self, now: float) -> float | None:
        """If it goes on as it went recently; None where that is not known."""
        rate = _ratio(self.done - self._older.done, now - self._older.time)
        return (self.total - self.done) / rate if self.total and rate > 0 else None

    # What happens

    def began(self, time: float, cluster: str, policy: str, apply: str, seed: int) -> None:
        self.policy = policy
        self._reset()
        self.time = time

    def joined(self, time: float, worker: int, incarnation: int = 1) -> None:
        self._pass(time)
        if not self.workers:  # until somebody comes, there is nothing to take a rate of
            self._older = self._newer = self._sums(time)
        record = self.workers.get(worker)
        if record is None:
            record = self.workers[worker] = LiveWorker(self.window)
        record.come(time, incarnation)
        self._members.change(time, +1)

    def left(self, time: float, worker: int, lost: bool = False) -> None:
        self._pass(time)
        record = self.workers[worker]
        self._stop_waiting(record, time)
        record.state = "left"
        self._members.change(time, -1)

    def granted(self, time: float, worker: int, batch_size: int | None, progress_gap: int) -> None:
        self._pass(time)
        record = self.workers[worker]
        self._stop_waiting(record, time)
        record.iteration += 1
        record.state = "computing"  # its pull is a part of that: a server does not see where it ends

    def computed(self, time: float, worker: int, seconds: float | None = None) -> None:
        self._pass(time)
        self._wait(self.workers[worker], time)

    def turned(self, time: float, worker: int) -> None:
        self._pass(time)
        record = self.workers[worker]
        self._stop_waiting(record, time)
        record.state = "pushing"

    def arrived(
        self,
        time: float,
        worker: int,
        iteration: int,
        batch_size: int,
        loss: float | None = None,
        incarnation: int = 1,
    ) -> None:
        self._pass(time)
        record = self.workers[worker]
        self._stop_waiting(record, time)
        record.iteration = iteration
        record.arrive(time, batch_size)
        self._wait(record, time)
        self._unsettled[worker, incarnation, iteration] = batch_size
        if loss is not None:
            record.loss = loss
            self._hear(loss)

    def applied(
        self,
        time: float,
        version: int,
        workers: tuple[int, ...],
        iterations: tuple[int, ...],
        staleness: tuple[int, ...],
        incarnations: tuple[int, ...] = (),
    ) -> None:
        self._pass(time)
        self.version = version
        for update, stale in zip(identities(workers, iterations, incarnations), staleness, strict=True):
            self.workers[update[0]].staleness = stale
            self._accept(update)
        self._stale += sum(staleness)
        self._stale_count += len(staleness)

    def kept(self, time: float, worker: int, iteration: int, slot: int, incarnation: int = 1) -> None:
        self._pass(time)
        self._accept((worker, incarnation, iteration))

    def discarded(self, time: float, worker: int, iteration: int, incarnation: int = 1) -> None:
        self._pass(time)
        self._unsettled.pop((worker, incarnation, iteration), None)

    def cancelled(self, time: float, worker: int) -> None:
        self._pass(time)
        record = self.workers[worker]
        self._stop_waiting(record, time)
        record.state = "waiting"

    def progressed(self, time: float, epoch: int, done: int, total: int) -> None:
        self._pass(time)
        self.epoch, self.done, self.total = epoch, done, total

    def _pass(self, time: float) -> None:
        """Time goes on; once in a window, what lies far back is left behind."""
        self.time = time
        if time - self._newer.time >= self.window:
            self._older, self._newer = self._newer, self._sums(time)

    def _sums(self, now: float) -> _Sums:
        waiting, members = self._waiting.total(now), self._members.total(now)
        return _Sums(now, self._samples, self._stale, self._stale_count, waiting, members, self.done)

    def _wait(self, record: LiveWorker, time: float) -> None:
        record.state = "waiting"
        record.waits_since = time
        self._waiting.change(time, +1)

    def _stop_waiting(self, record: LiveWorker, time: float) -> None:
        if record.waits_since is not None:
            record.stop_waiting(time)
            self._waiting.change(time, -1)

    def _accept(self, update: Identity) -> None:
        """Count an update once, also if it is kept and applied again and again."""
        samples = self._unsettled.pop(update, None)
        if samples is not None:
            self.updates += 1
            self._samples += samples

    def _hear(self, loss: float) -> None:
        if self.loss is None or not math.isfinite(self.loss + loss):
            self.loss, self._losses = loss, 1  # one that is not finite shows at once, and is gone with the next that is
        else:
            self._losses = min(self._losses + 1, SMOOTH)
            self.loss += (loss - self.loss) / self._losses


def line(live: Live, now: float | None = None) -> str:
    """The job in one plain line, for logs. What is not known is left out. `now`: by default, the last event's time."""
    now = live.time if now is None else now
    return "  ".join([f"{now:.1f} s", *([live.policy] if live.policy else []), *_figures(live, now), *_left(live, now)])


def table(live: Live, height: int = 24, now: float | None = None) -> RenderableType:
    """The job, and its workers as far as `height` lines have room for them. `now`: by default, the last event's time.

    At least one worker is shown, however little room there is.
    """
    now = live.time if now is None else now
    many = f"{live.members:,} worker" + ("" if live.members == 1 else "s")
    title = "  ".join([*([live.policy] if live.policy else []), many, f"version {live.version:,}", f"{now:.1f} s"])
    parts: list[RenderableType] = [
        Text(title, style="bold", no_wrap=True, overflow="ellipsis"),
        Text("  ".join(_figures(live, now)), no_wrap=True, overflow="ellipsis"),
    ]
    share = live.progress()
    if share is not None:
        bar = Table.grid(padding=(0, 2))
        bar.add_row(ProgressBar(total=1.0, completed=share, width=40), Text("".join(_left(live, now))))
        parts.append(bar)
    room = max(1, height - len(parts) - 2)  # but for the headings and the rule below them
    if len(live.workers) > room:
        room = max(1, room - 1)
    parts.append(_workers(live, room, now))
    more = len(live.workers) - room
    if more > 0:
        parts.append(Text(f"and {more:,} more", style="dim"))
    return Group(*parts)


def _workers(live: Live, most: int, now: float) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
    for heading in ("worker", "state", "iteration", "samples/s", "waiting", "staleness", "loss"):
        shown.add_column(heading, justify="left" if heading == "state" else "right", no_wrap=True)
    for number in heapq.nsmallest(most, list(live.workers)):  # a copy: a thread may draw while somebody joins
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
    """What is known of the whole job, one thing each."""
    said = [f"{live.updates:,} updates", f"{live.samples_per_second(now):,.0f} samples/s"]
    said.append(f"waiting {live.waiting_share(now):.0%}")
    staleness = live.staleness()
    if staleness is not None:
        said.append(f"staleness {staleness:.1f}")
    if live.loss is not None:
        said.append(f"loss {live.loss:.3g}")
    return said


def _left(live: Live, now: float) -> list[str]:
    """How far the job is, if that is known."""
    share, seconds = live.progress(), live.seconds_left(now)
    if share is None:
        return []
    done = f"{math.floor(100 * share)}% done"  # all is done only when all is done
    return [done if seconds is None or share >= 1 else f"{done}, {_about(seconds)} left"]


def _about(seconds: float) -> str:
    """A time that is only a guess, in the unit one would say it in."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
