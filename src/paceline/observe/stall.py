"""Notices that a job has stalled: for much longer than usual, no update has changed the model.

What is usual is learned from the job itself: the time between two changes of the model, and the time of an iteration.
So a federation whose rounds take minutes is not called stalled after one of them, and a job is given the time that it
took to write its last checkpoint. The job has not stalled before its first change of the model, because nothing is
usual then, nor when no worker is a member because all of them are done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

from paceline.observe.observer import Observer

TIMES = 10.0  # as long as usual is a stall
LEAST_SECONDS = 20.0  # a shorter pause is never one
LONGEST_TIMES = 2.0  # as long as the longest pause so far, which ended by itself, is a stall
REMEMBERED = 128  # pauses and iterations from which the usual time is taken
SHOWN = 3  # workers that a warning names
HELD_UP = 5.0  # seconds between two checks after which this process itself was held up


class _RunningIteration:
    """A worker's iteration that has begun, and what is known of the worker's earlier ones."""

    __slots__ = ("is_first", "seconds", "since", "stage")

    def __init__(self) -> None:
        self.since: float | None = None  # when it began; None: the worker waits for a Grant
        self.stage = ""  # "", or "turn": the worker waits for its turn, or "push"
        self.seconds = 0.0  # a mean of the last iterations; 0: none has ended
        self.is_first = True


class StallDetector(Observer):
    """An observer that warns once when a job stalls, and says once that it goes on."""

    def __init__(
        self, say: Callable[[str], None], times: float = TIMES, least: float = LEAST_SECONDS, policy: str = ""
    ) -> None:
        """say: is called with each warning. times, least: a stall is so many times the usual, and so many seconds."""
        self._say, self._times, self._least, self._policy = say, times, least, policy
        self.since: float | None = None  # when the model was last changed, if the job has stalled
        self._pauses: deque[float] = deque(maxlen=REMEMBERED)
        self._iterations: deque[float] = deque(maxlen=REMEMBERED)
        self._longest = 0.0  # pause that ended by itself
        self._first_iteration = 0.0  # the longest one of a worker that had just joined
        self._save_seconds = 0.0
        self._checked = 0.0
        self._reset()

    def _reset(self) -> None:
        self._workers: dict[int, _RunningIteration] = {}
        self._lost: set[int] = set()  # workers that may come back
        self._applied_at: float | None = None  # the last change of the model; None: none since the job was restarted
        self._is_disturbed = False  # has a worker been lost since?

    @property
    def is_stalled(self) -> bool:
        """Whether nothing has changed the model for much longer than usual."""
        return self.since is not None

    def check(self, now: float) -> None:
        """Warn if the job stalls. Call this about once a second, with the job's time.

        If the calls were far apart, this process was held up, and not the job.
        """
        before, self._checked = self._checked, now
        if self._applied_at is None or self.is_stalled:
            return
        if (away := now - before) > HELD_UP and before > self._applied_at:
            self._applied_at += away
            for worker in self._workers.values():
                worker.since = None if worker.since is None else worker.since + away
        pause = now - self._applied_at
        if pause < self._least or pause < self.patience() or not (self._workers or self._lost):
            return
        self.since = self._applied_at
        self._say(f"Nothing has changed the model for {_seconds(pause)}: {self._reason(now)}.")

    def patience(self) -> float:
        """Return the seconds without a change of the model after which the job has stalled."""
        iteration = median(self._iterations) if self._iterations else self._first_iteration
        usual = max(iteration, median(self._pauses) if self._pauses else 0.0)
        running = (worker for worker in self._workers.values() if worker.since is not None)
        joiner = self._first_iteration if any(worker.is_first for worker in running) else 0.0
        slowest = max((worker.seconds for worker in self._workers.values()), default=0.0)
        known = (
            self._least,
            self._times * usual,
            self._times * joiner,
            LONGEST_TIMES * slowest,
            LONGEST_TIMES * self._longest,
        )
        return max(known) + LONGEST_TIMES * self._save_seconds

    # Events

    def began(self, time: float, cluster: str, policy: str, apply: str, seed: int) -> None:
        self._policy = self._policy or policy
        self._reset()

    def joined(self, time: float, worker: int, incarnation: int = 1) -> None:
        self._workers[worker] = _RunningIteration()
        self._lost.discard(worker)

    def left(self, time: float, worker: int, lost: bool = False) -> None:
        self._workers.pop(worker, None)
        if lost:
            self._lost.add(worker)
            self._is_disturbed = True

    def granted(self, time: float, worker: int, batch_size: int | None, progress_gap: int) -> None:
        record = self._workers[worker]
        record.since, record.stage = time, ""

    def computed(self, time: float, worker: int, seconds: float | None = None) -> None:
        self._workers[worker].stage = "turn"

    def turned(self, time: float, worker: int) -> None:
        self._workers[worker].stage = "push"

    def cancelled(self, time: float, worker: int) -> None:
        self._workers[worker].since = None

    def arrived(
        self,
        time: float,
        worker: int,
        iteration: int,
        batch_size: int,
        loss: float | None = None,
        incarnation: int = 1,
    ) -> None:
        record = self._workers[worker]
        if record.since is None:
            return
        seconds, record.since = time - record.since, None
        if record.is_first:
            record.is_first = False
            self._first_iteration = max(self._first_iteration, seconds)
        else:
            self._iterations.append(seconds)
            record.seconds = seconds if not record.seconds else record.seconds + (seconds - record.seconds) / 8

    def applied(
        self,
        time: float,
        version: int,
        workers: tuple[int, ...],
        iterations: tuple[int, ...],
        staleness: tuple[int, ...],
        incarnations: tuple[int, ...] = (),
    ) -> None:
        self._goes_on(time)

    def kept(self, time: float, worker: int, iteration: int, slot: int, incarnation: int = 1) -> None:
        self._goes_on(time)  # it counts as done, and changes the model later

    def saved(self, time: float, version: int, seconds: float | None = None) -> None:
        self._save_seconds = seconds or 0.0

    def _goes_on(self, time: float) -> None:
        """Record that the job makes progress now."""
        if self._applied_at is not None:
            pause = time - self._applied_at
            self._pauses.append(pause)
            if not self._is_disturbed and pause > self._longest:
                self._longest = pause
        if self.since is not None:
            self._say(f"The job goes on after {_seconds(time - self.since)}.")
            self.since = None
        self._applied_at, self._is_disturbed = time, False

    # The reason

    def _reason(self, now: float) -> str:
        """Return the workers that the job waits for, as the end of a sentence without its full stop."""
        running = {number: worker for number, worker in self._workers.items() if worker.since is not None}
        busy = [number for number, worker in running.items() if worker.stage != "turn"]
        waiting = len(self._workers) - len(busy)
        if not self._workers:
            return f"{_workers(self._lost)} {_were(self._lost)} lost, and the job waits for new workers"
        if not busy:
            return f"{_count(waiting)} {_wait(waiting)} for a decision of {self._policy or 'the policy'}"
        slow = sorted(busy, key=lambda number: running[number].since or 0.0)
        told = [self._told(number, running[number], now) for number in slow[:SHOWN]]
        if len(slow) > SHOWN:
            told.append(f"{len(slow) - SHOWN} more are at work")
        if waiting:
            under = f" under {self._policy}" if self._policy else ""
            told.append(f"{_count(waiting)} {_wait(waiting)} for that{under}")
        if self._lost:
            told.append(f"{_workers(self._lost)} {_were(self._lost)} lost")
        return "; ".join(told)

    def _told(self, number: int, worker: _RunningIteration, now: float) -> str:
        """Return what a worker does, and since when."""
        does = "has been pushing" if worker.stage == "push" else "has not pushed"
        told = f"worker {number} {does} for {_seconds(now - (worker.since or now))}"
        if worker.seconds:
            return f"{told}, and its iterations usually take {_seconds(worker.seconds)}"
        return f"{told}, in its first iteration" if worker.is_first else told


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _count(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers:,} workers"


def _wait(workers: int) -> str:
    return "waits" if workers == 1 else "wait"


def _were(workers: set[int]) -> str:
    return "was" if len(workers) == 1 else "were"


def _workers(numbers: set[int]) -> str:
    """Return "worker 3", "workers 1 and 3" or "5 workers"."""
    if len(numbers) > SHOWN:
        return _count(len(numbers))
    names = [str(number) for number in sorted(numbers)]
    if len(names) == 1:
        return f"worker {names[0]}"
    return f"workers {', '.join(names[:-1])} and {names[-1]}"
