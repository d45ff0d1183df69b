"""Writes to a tracker from a thread of its own, so that a slow or broken tracker never slows the job or ends it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from paceline.metrics.errors import MetricsError
from paceline.metrics.job_scalars import JobScalars, ScalarRow

MAX_ROWS = 512  # that wait for a slow tracker; the oldest of them are left out
BEGIN_SECONDS = 20.0  # for a tracker to begin its run; the job does not wait for longer
END_SECONDS = 60.0  # for a tracker to write its last rows, after the job has ended
MAX_REASON = 300  # letters of an error
NOTE_SECONDS = 3.0  # after which the user is told what is waited for


class Tracker(Protocol):
    """A tool that keeps the curves of a run. All methods are called from one thread, `begin` first and `end` last."""

    name: str

    def begin(self, run: str, parameters: dict[str, object]) -> None:
        """Begin a run of this name."""

    def describe(self, parameters: dict[str, object]) -> None:
        """Add parameters of the run."""

    def write(self, row: ScalarRow) -> None:
        """Write scalars."""

    def end(self, failed: bool) -> None:
        """Complete the run."""


class BackgroundTracker(JobScalars):
    """An observer that has a thread write the scalars of a job to a tracker. An error ends the writing with a warning.

    At most MAX_ROWS rows wait. The job never waits: rows that a slow tracker cannot take are left out, and counted.
    """

    def __init__(
        self,
        tracker: Tracker,
        run: str,
        parameters: dict[str, object],
        warn: Callable[[str], None],
        patience: float = END_SECONDS,
    ) -> None:
        """warn: is called with one sentence, from any thread. patience: seconds for the last rows, at the end."""
        super().__init__(self._put, self._tell)
        self._tracker, self._run, self._warn, self._patience = tracker, run, warn, patience
        self._parameters: dict[str, object] = dict(parameters)
        self._new: dict[str, object] = {}  # parameters that the tracker does not know yet
        self._rows: deque[ScalarRow] = deque()
        self._changed = threading.Condition()
        self._is_over = self._has_failed = self._job_failed = False
        self.dropped = 0  # rows that were left out
        self._has_begun = False
        self._is_awaited = True  # may wait_until_begun still raise an error of `begin`?
        self._error = ""
        self._thread = threading.Thread(target=self._work, name=f"{tracker.name} log", daemon=True)
        self._thread.start()

    def wait_until_begun(self, seconds: float = BEGIN_SECONDS) -> None:
        """Wait for the run to begin, but not for longer. Raise MetricsError if it cannot begin.

        If it cannot begin later, the user is warned.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_begun or self._error, seconds)
            self._is_awaited = False
            if self._error and not self._has_begun:
                raise MetricsError(f"{self._tracker.name} cannot begin a run: {self._error}")

    def close(self, failed: bool = False) -> None:
        """Write the last rows, but not for longer than the patience. failed: whether the job has failed."""
        self.flush()
        with self._changed:
            self._is_over, self._job_failed = True, failed
            self._changed.notify_all()
        self._thread.join(min(NOTE_SECONDS, self._patience))
        if self._thread.is_alive() and self._patience > NOTE_SECONDS:
            self._warn(f"Waiting up to {self._patience:g} s for {self._tracker.name} to take the last metrics.")
            self._thread.join(self._patience - NOTE_SECONDS)
        if self._thread.is_alive():
            self._has_failed = True  # the thread ends with this process, or after its current row
            self._warn(f"{self._tracker.name} did not take the last metrics within {self._patience:g} s.")
        elif self.dropped and not self._has_failed:
            self._warn(f"{self._tracker.name} was too slow for {self.dropped} rows of metrics, which are left out.")

    def _put(self, row: ScalarRow) -> None:
        with self._changed:
            if self._has_failed:
                return
            if len(self._rows) >= MAX_ROWS:
                self._rows.popleft()
                self.dropped += 1
            self._rows.append(row)
            self._changed.notify_all()

    def _tell(self, parameters: dict[str, object]) -> None:
        with self._changed:
            for key, value in parameters.items():
                if self._parameters.get(key) != value:
                    self._parameters[key] = self._new[key] = value
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            self._tracker.begin(self._run, dict(self._parameters))
            with self._changed:
                self._has_begun = True
                self._changed.notify_all()
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._rows or self._new or self._is_over)
                    row = self._rows.popleft() if self._rows else None
                    described, self._new = self._new, {}
                    ends = row is None and not described
                if self._has_failed:
                    return
                if described:
                    self._tracker.describe(described)
                if row:
                    self._tracker.write(row)
                if ends:
                    break
            self._tracker.end(self._job_failed)
        except Exception as error:
            with self._changed:
                self._has_failed = True
                self._rows.clear()
                self._error = " ".join(str(error).split())[:MAX_REASON] or type(error).__name__
                is_raised = self._is_awaited and not self._has_begun
                self._changed.notify_all()
            if self._has_begun:
                self._warn(f"{self._tracker.name} failed, and gets no more metrics of this job: {self._error}")
            elif not is_raised:
                self._warn(f"{self._tracker.name} cannot begin a run, and gets no metrics of this job: {self._error}")
