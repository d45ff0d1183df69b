"""The curves of a job that a tracker of experiments keeps: rows of scalars, over versions of the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from paceline.observe.live_state import INTERNAL_METRICS
from paceline.observe.observer import Observer
from paceline.observe.trace import Identity, identities

ROW_SECONDS = 1.0  # between two rows
MAX_NAMES = 64  # names of metrics that workers report; any others are left out


class ScalarRow(NamedTuple):
    """The scalars since the row before."""

    version: int
    seconds: float  # since the first worker joined
    values: dict[str, float]


class _Mean:
    """The mean of the values since it was taken last."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1

    def take(self) -> float | None:
        """Return the mean, or None if there are no values, and begin anew."""
        mean = self.total / self.count if self.count else None
        self.total, self.count = 0.0, 0
        return mean


class JobScalars(Observer):
    """An observer that passes on a row of scalars about once a second, as long as updates are applied.

    A value in a row is the mean over all updates and reports since the row before. So a job with thousands of updates
    in a second, or thousands of clients, makes as many rows as a slow one.
    """

    def __init__(self, write: Callable[[ScalarRow], None], describe: Callable[[dict[str, object]], None]) -> None:
        """describe: is called with parameters of the run that become known later, such as the optimizer."""
        self._write, self._describe = write, describe
        self._began: float | None = None
        self._written = -math.inf  # the time of the last row
        self._version = 0
        self._epoch: int | None = None
        self._samples = 0
        self._since = self._member_seconds = self._waited = self._counted = 0.0
        self._members = self._waiting = 0
        self._waits: set[int] = set()
        self._present: set[int] = set()
        self._means = {name: _Mean() for name in ("loss", "staleness", "batch_size")}
        self._reports: dict[str, _Mean] = {}
        self._undecided: dict[Identity, int] = {}  # samples of the updates that the policy has not decided about
        self._time = 0.0

    def flush(self) -> None:
        """Pass on what has happened since the last row."""
        if self._samples or any(mean.count for mean in self._reports.values()):
            self._row(self._time)

    # Events

    def began(self, time: float, cluster: str, policy: str, apply: str, seed: int) -> None:
        self._count(time)
        self._members = self._waiting = 0
        self._waits.clear()
        self._present.clear()
        self._undecided.clear()
        self._describe({"policy": policy, "apply": apply})

    def described(self, time: float, elements: int, optimizer: str) -> None:
        self._describe({"model elements": elements, "optimizer": optimizer})

    def joined(self, time: float, worker: int, incarnation: int = 1) -> None:
        self._count(time)
        if self._began is None:
            self._began = self._since = time
        self._present.add(worker)
        self._members = len(self._present)

    def left(self, time: float, worker: int, lost: bool = False) -> None:
        self._go_on(time, worker)
        self._present.discard(worker)
        self._members = len(self._present)

    def granted(self, time: float, worker: int, batch_size: int | None, progress_gap: int) -> None:
        if worker in self._waits:
            self._go_on(time, worker)

    def computed(self, time: float, worker: int, seconds: float | None = None) -> None:
        self._wait(time, worker)

    def turned(self, time: float, worker: int) -> None:
        self._go_on(time, worker)

    def cancelled(self, time: float, worker: int) -> None:
        self._wait(time, worker)

    def arrived(
        self,
        time: float,
        worker: int,
        iteration: int,
        batch_size: int,
        loss: float | None = None,
        incarnation: int = 1,
    ) -> None:
        self._wait(time, worker)
        self._undecided[worker, incarnation, iteration] = batch_size
        self._means["batch_size"].add(batch_size)
        if loss is not None:
            self._means["loss"].add(loss)

    def applied(
        self,
        time: float,
        version: int,
        workers: tuple[int, ...],
        iterations: tuple[int, ...],
        staleness: tuple[int, ...],
        incarnations: tuple[int, ...] = (),
    ) -> None:
        self._time, self._version = time, version
        for update in identities(workers, iterations, incarnations):
            self._samples += self._undecided.pop(update, 0)
        mean = self._means["staleness"]
        mean.total += sum(staleness)
        mean.count += len(staleness)
        if time - self._written >= ROW_SECONDS:
            self._row(time)

    def kept(self, time: float, worker: int, iteration: int, slot: int, incarnation: int = 1) -> None:
        self._samples += self._undecided.pop((worker, incarnation, iteration), 0)

    def discarded(self, time: float, worker: int, iteration: int, incarnation: int = 1) -> None:
        self._undecided.pop((worker, incarnation, iteration), None)

    def progressed(self, time: float, epoch: int, done: int, total: int) -> None:
        self._epoch = epoch

    def measured(self, time: float, worker: int, kind: str, value: float) -> None:
        if kind in INTERNAL_METRICS or (kind not in self._reports and len(self._reports) >= MAX_NAMES):
            return
        self._time = max(self._time, time)
        self._reports.setdefault(kind, _Mean()).add(value)

    # Rows

    def _count(self, time: float) -> None:
        """Add the seconds since the last change of the members or of those that wait."""
        elapsed = time - self._counted
        self._member_seconds += elapsed * self._members
        self._waited += elapsed * self._waiting
        self._counted = self._time = time

    def _wait(self, time: float, worker: int) -> None:
        self._count(time)
        self._waits.add(worker)
        self._waiting = len(self._waits)

    def _go_on(self, time: float, worker: int) -> None:
        self._count(time)
        self._waits.discard(worker)
        self._waiting = len(self._waits)

    def _row(self, time: float) -> None:
        self._count(time)
        values: dict[str, float] = {}
        for name, mean in (*self._means.items(), *self._reports.items()):
            value = mean.take()
            if value is not None:
                values[name] = value
        span = time - self._since
        self._since = self._written = time
        if span > 0 and self._began is not None:
            values["samples_per_second"] = self._samples / span
        if self._member_seconds > 0:
            values["waiting_share"] = self._waited / self._member_seconds
        values["members"] = self._members
        if self._epoch is not None:
            values["epoch"] = self._epoch
        self._samples, self._member_seconds, self._waited = 0, 0.0, 0.0
        self._write(ScalarRow(self._version, time - (self._began or 0.0), values))
