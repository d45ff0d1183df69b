"""A tracker's thread: it never slows the job, and its errors never end it."""

from __future__ import annotations

import threading

import pytest

from paceline.metrics.background import MAX_ROWS, BackgroundTracker
from paceline.metrics.errors import MetricsError
from paceline.metrics.job_scalars import ScalarRow


class NotingTracker:
    """A tracker that notes what it is told. `gate` holds it up; `fails_at` is the version at which it fails."""

    name = "Noting"

    def __init__(self, fails_at: int | None = None, fails_to_begin: bool = False) -> None:
        self.fails_at, self.fails_to_begin = fails_at, fails_to_begin
        self.may_begin = threading.Event()
        self.may_begin.set()
        self.gate = threading.Event()
        self.gate.set()
        self.parameters: dict[str, object] = {}
        self.rows: list[ScalarRow] = []
        self.ended: bool | None = None

    def begin(self, run: str, parameters: dict[str, object]) -> None:
        assert self.may_begin.wait(60)
        if self.fails_to_begin:
            raise ConnectionError("no answer\nfrom there")
        self.parameters |= parameters

    def describe(self, parameters: dict[str, object]) -> None:
        self.parameters |= parameters

    def write(self, row: ScalarRow) -> None:
        assert self.gate.wait(60)
        if row.version == self.fails_at:
            raise RuntimeError("the disk is full")
        self.rows.append(row)

    def end(self, failed: bool) -> None:
        self.ended = failed


def drive(log: BackgroundTracker, updates: int) -> None:
    """Tell of updates of one worker, one in two seconds."""
    log.began(0.0, "", "asp", "whole", 0)
    log.joined(0.0, 0)
    for number in range(1, updates + 1):
        log.arrived(2.0 * number, 0, number, 8, 1.0 / number)
        log.applied(2.0 * number, number, (0,), (number,), (0,), (1,))
        log.granted(2.0 * number, 0, None, 0)


@pytest.mark.parametrize("failed", [False, True])
def test_all_rows_reach_the_tracker(failed: bool) -> None:
    tracker, said = NotingTracker(), list[str]()
    log = BackgroundTracker(tracker, "run", {"workers": 1}, said.append)
    log.wait_until_begun()
    drive(log, 20)
    log.close(failed)
    assert [row.version for row in tracker.rows] == list(range(1, 21))
    assert tracker.rows[3].values["loss"] == 0.25
    assert tracker.parameters == {"workers": 1, "policy": "asp", "apply": "whole"}
    assert (tracker.ended, said) == (failed, [])


@pytest.mark.core
def test_a_tracker_that_hangs_holds_a_bounded_number_of_rows_and_does_not_hold_up_the_job() -> None:
    tracker, said = NotingTracker(), list[str]()
    tracker.gate.clear()
    log = BackgroundTracker(tracker, "run", {}, said.append, patience=0.1)
    drive(log, 5000)  # returns, although nothing is written
    assert len(log._rows) <= MAX_ROWS
    assert log.dropped >= 5000 - MAX_ROWS - 1
    log.close()
    assert said == ["Noting did not take the last metrics within 0.1 s."]
    tracker.gate.set()
    log._thread.join(20)
    assert not log._thread.is_alive()


def test_a_slow_tracker_gets_the_newest_rows_and_the_user_learns_how_many_are_missing() -> None:
    tracker, said = NotingTracker(), list[str]()
    tracker.gate.clear()
    log = BackgroundTracker(tracker, "run", {}, said.append)
    drive(log, MAX_ROWS + 100)
    tracker.gate.set()
    log.close()
    assert tracker.rows[-1].version == MAX_ROWS + 100
    assert len(tracker.rows) == MAX_ROWS + 100 - log.dropped
    assert said == [f"Noting was too slow for {log.dropped} rows of metrics, which are left out."]


def test_an_error_warns_once_and_later_rows_are_forgotten() -> None:
    tracker, said = NotingTracker(fails_at=3), list[str]()
    log = BackgroundTracker(tracker, "run", {}, said.append)
    drive(log, 50)
    log._thread.join(20)
    drive(log, 50)
    log.close()
    assert said == ["Noting failed, and gets no more metrics of this job: the disk is full"]
    assert len(tracker.rows) == 2
    assert len(log._rows) == 0


def test_a_tracker_that_cannot_begin_is_refused_in_one_sentence() -> None:
    log = BackgroundTracker(NotingTracker(fails_to_begin=True), "run", {}, lambda _: None)
    with pytest.raises(MetricsError, match=r"^Noting cannot begin a run: no answer from there$"):
        log.wait_until_begun()
    log.close()


@pytest.mark.core
def test_a_tracker_that_fails_to_begin_after_the_wait_is_told_in_one_warning() -> None:
    tracker, said = NotingTracker(fails_to_begin=True), list[str]()
    tracker.may_begin.clear()
    log = BackgroundTracker(tracker, "run", {}, said.append)
    log.wait_until_begun(0.0)  # returns: the job does not wait for longer
    drive(log, 3)
    tracker.may_begin.set()
    log._thread.join(20)
    drive(log, 3)
    log.close()
    assert said == ["Noting cannot begin a run, and gets no metrics of this job: no answer from there"]
    assert tracker.rows == []
