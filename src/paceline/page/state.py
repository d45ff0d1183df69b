"""The state of the page: the figures and pictures of a job, computed from its trace events in bounded memory."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from paceline.observe.live_state import Live
from paceline.observe.observer import Observer
from paceline.observe.summary import Summary
from paceline.observe.trace import KINDS, NAMES, Event
from paceline.page.advice import Situation, advice, health, speed
from paceline.page.curves import JobCurves, histogram, shown
from paceline.page.happenings import Happenings
from paceline.page.recent import ACTIVITIES, RecentActivity
from paceline.policies import without_mean_weights

#: Policies of federations, whose workers are called clients.
FEDERATED = {"fl-r2sp", "safa", "fedbuff", "filtered"}
MAX_ROWS = 64  # workers that are drawn one by one; more are drawn as distributions
MAX_CHANGES = 1000  # iterations in one frame; of a faster job, some are not drawn
MAX_SNAPSHOT = 2048  # iterations that a new viewer gets
MAX_RUNS = 20  # earlier runs that are remembered
MAX_TEXT = 200  # characters of a name
ROUNDS = 8  # over which recent figures are means
LEAST_RECENT = 32  # iterations that recent figures cover at least
TYPICAL = 20  # last iterations of a worker that tell how long it usually computes
LEAST_TYPICAL = 9  # iterations of a worker without which it is not compared with others


@dataclass
class Shown:
    """The facts that the page knows beside the events."""

    title: str = ""  # a name for the job: a script or a file
    recorded: bool = False  # are the events those of a recorded run?
    floors: Sequence[float | None] = field(default_factory=list)  # of each run, in seconds per iteration


class PageState:
    """The state of the page. It takes events one by one, and returns what has changed."""

    def __init__(self, shown: Shown | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.shown = shown or Shown()
        self.state = "recorded" if self.shown.recorded else "running"  # or ended, or lost
        self.problem = ""
        self.replay: dict[str, float] | None = None  # of a recorded run: its speed, and how much of it was shown
        self.runs: list[dict[str, Any]] = []  # the runs before this one
        self._clock = clock
        self._number = -1  # of the run
        self.events = 0
        self._begin("", "", "")

    def _begin(self, cluster: str, policy: str, apply: str) -> None:
        self.cluster, self.policy, self.apply = cluster[:MAX_TEXT], policy[:MAX_TEXT], apply
        self.live, self.summary, self.recent = Live(policy), Summary(), RecentActivity()
        self.curves, self.happenings = JobCurves(), Happenings()
        self._clipped_to: float | None = None
        self._lag: float | None = None  # the clock's time minus the job's
        self._applied = deque[float](maxlen=64)  # when updates were applied
        observers = (self.live, self.summary, self.recent, self.curves, self.happenings)
        self._methods = {name: [getattr(each, name) for each in observers if _hears(each, name)] for name in KINDS}
        self._methods["applied"].append(lambda at, *_: self._applied.append(at))

    # Events

    def tell(self, event: Event) -> None:
        """Take an event of the job."""
        name = NAMES[type(event)]
        self.events += 1
        if name == "began":
            self._new_run(event)
            return
        for method in self._methods[name]:
            method(*event)
        lag = self._clock() - event[0]
        if self._lag is None or lag < self._lag:
            self._lag = lag
        self.problem = ""
        if self.state in ("lost", "ended"):
            self.state = "running"

    def _new_run(self, event: Any) -> None:
        if self.live.updates:
            self.runs.append(self._as_run())
            del self.runs[:-MAX_RUNS]
        self._number += 1
        self._begin(str(event.cluster), without_mean_weights(str(event.policy)), str(event.apply))
        self.live.time = event.time

    def end(self) -> None:
        """The job has ended: time stands still."""
        self._stop("ended")

    def lose(self, problem: str = "") -> None:
        """The job's server does not answer. problem: why it cannot be watched."""
        self.problem = problem
        if self.state == "running":
            is_done = self.live.updates and not self.live.members
            self._stop("ended" if is_done else "lost")

    def _stop(self, state: str) -> None:
        self._clipped_to = self.live.time
        self.state = state

    def now(self) -> float:
        """Return the job's time."""
        if self._clipped_to is not None and self.state != "running":
            return self._clipped_to
        if self.state == "recorded" or self._lag is None:
            return self.live.time
        return max(self.live.time, self._clock() - self._lag)

    @property
    def floor(self) -> float | None:
        """The shortest seconds per iteration of this run under any policy, or None if they are unknown."""
        floors = self.shown.floors
        return floors[min(max(self._number, 0), len(floors) - 1)] if floors else None

    @property
    def is_crowd(self) -> bool:
        """Whether there are so many workers that they are drawn as distributions."""
        return len(self.recent.workers) > MAX_ROWS

    @property
    def is_federation(self) -> bool:
        return self.policy.partition(":")[0] in FEDERATED

    @property
    def has_clients(self) -> bool:
        """Whether to call the workers clients."""
        return self.is_crowd or self.is_federation

    @property
    def title(self) -> str:
        """A name for the job, or an empty text if nothing is known of it."""
        return self.shown.title[:MAX_TEXT] or self.cluster or ("Federation" if self.is_federation else "")

    # Frames

    def changes(self, slow: bool) -> dict[str, Any]:
        """Return what has changed since the last call. slow: also what need not be renewed ten times a second."""
        recent, crowd = self.recent, self.is_crowd
        taken, steps = recent.take(), recent.steps.take()
        frame = self._fast() | {
            "links": {side: points.take() for side, points in recent.links.items()},
            "iterations": [] if crowd else [record.as_row() for record in taken[-MAX_CHANGES:]],
            "steps": steps if crowd else [],
        }
        return frame | (self.figures() if slow else {})

    def snapshot(self) -> dict[str, Any]:
        """Return everything that a new viewer needs."""
        recent, crowd = self.recent, self.is_crowd
        return (
            self._fast()
            | self.figures()
            | {
                "full": True,
                "links": {side: list(points.items) for side, points in recent.links.items()},
                "iterations": [] if crowd else [record.as_row() for record in recent.last(MAX_SNAPSHOT)],
                "steps": list(recent.steps.items) if crowd else [],
            }
        )

    def _fast(self) -> dict[str, Any]:
        workers = [] if self.is_crowd else [self.recent.workers[each].as_row(each) for each in self._rows()]
        moving = self.state in ("running", "recorded")
        pace = 0.0 if not moving else 1.0 if self.replay is None else self.replay["speed"]
        return {"run": self._number, "now": round(self.now(), 4), "pace": pace, "workers": workers}

    def figures(self) -> dict[str, Any]:
        """Return the sentences and the figures."""
        situation, report = self.situation(), self.summary.report()
        live, now = self.live, self.now()
        figures: dict[str, Any] = {
            "members": live.members,
            "updates": report.updates,
            "discarded": report.discarded,
            "lost": report.lost,
            "version": live.version,
            "seconds": live.seconds(now),
            "recent_iteration_seconds": situation.iteration_seconds,
            "recent_samples_per_second": situation.samples_per_second,
            "iteration_seconds": report.mean_iteration_seconds,
            "samples_per_second": report.samples_per_second,
            "mean_staleness": report.mean_staleness,
            "max_staleness": report.max_staleness,
            "floor": situation.floor,
            "done": live.progress(),
            "seconds_left": live.seconds_left(now),
            "loss": shown(live.loss),
            "epoch": live.epoch + 1 if live.done else None,
        }
        sentences = {"health": health(situation), "speed": speed(situation), "advice": advice(situation)}
        return {
            "job": {
                "title": self.title,
                "cluster": self.cluster,
                "policy": self.policy,
                "apply": self.apply,
                "state": self.state,
                "clients": self.has_clients,
                "began": live.began_at,
                "replay": self.replay,
            },
            "sentences": {name: list(sentence) for name, sentence in sentences.items()},
            "figures": figures,
            "unit": live.rate_unit,
            "shares": situation.shares,
            "curves": self.curves.as_rows(),
            "happenings": self.happenings.as_rows("client" if self.has_clients else "worker"),
            "checkpoints": self.happenings.checkpoints,
            "runs": self.runs,
            "crowd": self._crowd(report.updates_by_worker) if self.is_crowd else None,
        }

    def situation(self) -> Situation:
        """Return the figures of the recent past that the sentences are about."""
        recent, live, now = self.recent, self.live, self.now()
        last = recent.last(max(LEAST_RECENT, ROUNDS * max(1, live.members)))
        total = sum(record.seconds for record in last)
        mean = total / len(last) if last else None
        samples = sum(record.batch for record in last if record.fate != "discarded")
        names = ACTIVITIES if total else ()
        shares: dict[str, float] = {name: sum(record.share(name) for record in last) / total for name in names}
        applied = list(self._applied)
        gaps = [b - a for a, b in itertools.pairwise(applied)]
        waits = [each for each, it in recent.workers.items() if it.activity not in ("waiting", "left")]
        return Situation(
            policy=self.policy,
            clients=self.has_clients,
            state=self.state,
            problem=self.problem,
            members=live.members,
            joined_early=live.joined_early,
            missing=live.missing,
            updates=live.updates,
            lost=self.happenings.lost,
            lost_now={worker: now - since for worker, since in self.happenings.lost_now.items()},
            awaited=waits if len(waits) < max(2, live.members) else [],
            quiet=None if recent.applied_at is None else now - recent.applied_at,
            gap=max(gaps) if gaps else None,
            loss=live.loss,
            iteration_seconds=mean,
            samples_per_second=samples / total * live.members if total else 0.0,
            floor=self.floor,
            shares=shares,
            staleness=live.staleness(),
            links=self._link_use(last[0].began if last else now, now),
            slowest=self._slowest(),
        )

    def _link_use(self, since: float, until: float) -> dict[str, float]:
        """Return the mean use of the links in each direction, as far as it was observed."""
        use = {}
        for side, points in self.recent.links.items():
            if not points.items:
                continue
            first = max(since, points.items[0][0])
            total, before, level = 0.0, first, 0.0
            for at, fraction in points.items:
                if at > before:
                    total += level * (at - before)
                    before = at
                level = fraction
            total += level * max(0.0, until - before)
            use[side] = total / (until - first) if until > first else level
        return use

    def _slowest(self) -> tuple[Any, float] | None:
        """Return the worker that computes longest, and its usual time as a multiple of that of the others.

        The usual time is a median, because single iterations of equal workers differ much on a busy machine.
        """
        if self.has_clients:
            return None  # nothing is said of a single client
        times = {
            worker: median(each)
            for worker, each in self.recent.compute_seconds(TYPICAL).items()
            if len(each) >= LEAST_TYPICAL and self.recent.workers[worker].activity != "left"
        }
        if len(times) < 2:
            return None
        worker = max(times, key=lambda each: times[each])
        longest = times.pop(worker)
        others = median(times.values())
        return (worker, longest / others) if others > 0 else None

    def _rows(self) -> list[Any]:
        """Return the workers in the order of their rows: by number, then those with other names."""
        numbers = sorted(each for each in self.recent.workers if isinstance(each, int))
        return numbers + sorted((each for each in self.recent.workers if not isinstance(each, int)), key=str)

    def _crowd(self, updates: dict[int, int]) -> dict[str, Any]:
        """Return the distributions of many workers."""
        last = list(self.recent.iterations)
        return {
            "now": [self.recent.counts[activity] for activity in ACTIVITIES],
            "iteration_seconds": histogram([record.seconds for record in last]),
            "staleness": histogram([record.staleness for record in last if record.staleness is not None]),
            "updates": histogram(list(updates.values())),
            "batches": histogram([now.batch for now in self.recent.workers.values() if now.batch]),
        }

    def _as_run(self) -> dict[str, Any]:
        """Return the figures of this run, for the list of earlier ones."""
        report = self.summary.report()
        last = [curve for curve in self.curves.as_rows() if curve["name"] != "loss"]
        return {
            "policy": self.policy,
            "iteration_seconds": report.mean_iteration_seconds,
            "samples_per_second": report.samples_per_second,
            "unit": report.rate_unit,
            "mean_staleness": report.mean_staleness,
            "max_staleness": report.max_staleness,
            "updates": report.updates,
            "metric": [last[0]["name"], last[0]["last"]] if last else None,
        }


def _hears(observer: Any, name: str) -> bool:
    """Return whether an observer has a method of its own for this kind of event."""
    method = getattr(observer, name, None)
    return method is not None and getattr(method, "__func__", None) is not getattr(Observer, name, None)
