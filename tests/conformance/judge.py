"""A judge of traces. It keeps its own records, from the events alone, and compares the events with them.

The judge knows only the name of the policy, and nothing of the driver. It can judge the trace of any driver.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.observe.trace import (
    Applied,
    Arrived,
    Began,
    Cancelled,
    Computed,
    Discarded,
    Event,
    Granted,
    Identity,
    Joined,
    Kept,
    Left,
    Pulled,
    Pulling,
    Pushing,
    Turned,
    Used,
    identities,
)

#: State of a worker → the events that may follow.
MAY_FOLLOW: dict[str, set[type]] = {
    "gone": {Joined},
    "waiting": {Granted, Left},
    "granted": {Pulling, Pulled, Cancelled, Left},
    "pulling": {Pulled, Cancelled, Left},
    "computing": {Computed, Cancelled, Left},
    "computed": {Turned, Cancelled, Left},
    "turned": {Pushing, Arrived, Cancelled, Left},
    "pushing": {Arrived, Cancelled, Left},
}
#: Event of a worker → its state after the event.
STATE_AFTER: dict[type, str] = {
    Joined: "waiting",
    Granted: "granted",
    Pulling: "pulling",
    Pulled: "computing",
    Computed: "computed",
    Turned: "turned",
    Pushing: "pushing",
    Arrived: "waiting",
    Cancelled: "waiting",
    Left: "gone",
}


@dataclass(eq=False)
class Task:
    """One Grant, and the update that answers it."""

    worker: int
    incarnation: int
    iteration: int
    batch_size: int | None
    company: set[int]  # every member since the Grant or, if streamed, since the Turn before it
    version: int = -1  # of the pulled model

    @property
    def identity(self) -> Identity:
        return self.worker, self.incarnation, self.iteration


@dataclass
class Judge:
    """Judges a trace. It raises AssertionError at the first event that breaks a rule or a promise."""

    gap: float = float("inf")  # the largest progress gap that the policy allows
    turns: float = float("inf")  # the largest number of seats in the ring, if the policy has one
    ring: bool = False  # whether the number of seats bounds the staleness
    during: float = float("inf")  # the largest number of updates that another worker pushes during an iteration
    at_once: bool = False  # whether every update is applied when it arrives
    streamed: bool = False  # whether a worker's model comes back with its push, from its Turn on
    fresh: bool = False  # whether every applied update is computed from the newest model

    now: float = 0.0
    version: int = 0
    state: dict[int, str] = field(default_factory=dict)  # worker → its state
    incarnations: dict[int, int] = field(default_factory=dict)  # worker → its newest incarnation
    done: dict[int, int] = field(default_factory=dict)  # member → number of completed iterations
    slowest: int = 0  # the least progress of the members that have been granted
    #: Streamed: member → every member since it asked for a model.
    since: dict[int, set[int]] = field(default_factory=dict)
    grants: dict[int, int] = field(default_factory=dict)  # member → number of Grants since it joined
    running: dict[int, Task] = field(default_factory=dict)
    waiting: dict[Identity, Task] = field(default_factory=dict)  # updates that are not decided yet
    kept: dict[int, Task] = field(default_factory=dict)  # slot → the kept update
    arrivals: int = 0
    applied: int = 0
    discarded: int = 0
    granted_ever: dict[int, int] = field(default_factory=dict)  # worker → number of all its Grants
    departures: int = 0

    def watch(self, events: Iterable[Event]) -> Judge:
        """Judge all events of a trace."""
        for event in events:
            try:
                self.see(event)
            except AssertionError as error:
                error.add_note(f"at {event}")
                raise
        return self

    def see(self, event: Event) -> None:
        """Judge the next event."""
        assert event.time >= self.now, "time went backwards"
        self.now = event.time
        if type(event) in STATE_AFTER:
            worker: int = event.worker  # type: ignore[union-attr]
            before = self.state.get(worker, "gone")
            assert type(event) in MAY_FOLLOW[before], f"worker {worker} was {before}"
            self.state[worker] = STATE_AFTER[type(event)]
        match event:
            case Joined(_, worker, incarnation):
                assert incarnation > self.incarnations.get(worker, 0), f"worker {worker} is no new incarnation"
                self.incarnations[worker] = incarnation
                self.done[worker] = self.slowest
                self.grants[worker] = 0
                tasks = [*self.running.values(), *self.waiting.values()]
                for company in [*(task.company for task in tasks), *self.since.values()]:
                    company.add(worker)
            case Left(_, worker):
                del self.done[worker], self.grants[worker]
                self.since.pop(worker, None)
                self.running.pop(worker, None)
                self.departures += 1
            case Granted(_, worker, batch_size, progress_gap):
                if not self.grants[worker]:
                    self.done[worker] = self.slowest
                assert progress_gap == self.done[worker] - self.slowest
                assert progress_gap <= self.gap, f"worker {worker} is too far ahead"
                assert batch_size is None or batch_size >= 1
                self.grants[worker] += 1
                self.granted_ever[worker] = self.granted_ever.get(worker, 0) + 1
                company = set(self.done) | self.since.pop(worker, set())
                task = Task(worker, self.incarnations[worker], self.grants[worker], batch_size, company)
                self.running[worker] = task
            case Pulled(_, worker, version):
                assert 0 <= version <= self.version, "this version does not exist yet"
                self.running[worker].version = version
            case Cancelled(_, worker):
                del self.running[worker]
            case Arrived(_, worker, iteration, batch_size, _, incarnation):
                task = self.running.pop(worker)
                assert (worker, incarnation, iteration) == task.identity
                assert batch_size == task.batch_size or (task.batch_size is None and batch_size >= 1)
                self.done[worker] += 1
                self.arrivals += 1
                self.waiting[task.identity] = task
            case Applied(_, version, workers, iterations, staleness, incarnations):
                assert version == self.version + 1, "the version must grow by one"
                assert len(workers) == len(iterations) == len(staleness) == len(incarnations) > 0
                updates = list(identities(workers, iterations, incarnations))
                assert len(set(updates)) == len(updates), "an Apply names an update twice"
                for update, stale in zip(updates, staleness, strict=True):
                    self._apply(update, stale)
                self.version = version
            case Kept(_, worker, iteration, slot, incarnation):
                self.kept[slot] = self._settle((worker, incarnation, iteration))
            case Discarded(_, worker, iteration, incarnation):
                self._settle((worker, incarnation, iteration))
                self.discarded += 1
            case Used(_, direction, fraction):
                assert direction in ("in", "out")
                assert 0.0 <= fraction <= 1.0
            case Began():
                raise AssertionError("Began must be the first event")
        if self.at_once and not isinstance(event, Arrived):
            assert not self.waiting, "an update was left undecided"
        if self.streamed and isinstance(event, Joined | Turned | Cancelled):
            self.since[event.worker] = set(self.done)
        if begun := [done for worker, done in self.done.items() if self.grants[worker]]:
            self.slowest = min(begun)

    def _apply(self, update: Identity, staleness: int) -> None:
        kept = {task.identity: task for task in self.kept.values()}
        if update in kept:
            task = kept[update]
        else:
            task = self._settle(update)
            self.applied += 1
        assert staleness == self.version - task.version, f"{_described(update)} is not {staleness} versions old"
        if self.ring:
            most = min(self.turns, len(task.company)) - 1
            assert staleness <= most, f"{_described(update)} is {staleness} versions old; at most {most} are allowed"
        most = self.during * max(1, len(task.company) - 1)
        assert staleness <= most, f"{_described(update)} is {staleness} versions old; at most {most} are allowed"
        assert staleness == 0 or not self.fresh, f"{_described(update)} is {staleness} versions old"

    def _settle(self, update: Identity) -> Task:
        assert update in self.waiting, f"{_described(update)} has not arrived or is settled already"
        return self.waiting.pop(update)


def _described(update: Identity) -> str:
    worker, incarnation, iteration = update
    return f"update {iteration} of worker {worker}'s incarnation {incarnation}"


def judge_of(spec: str, streamed: bool = False) -> Judge:
    """Return a judge of the promises of this policy."""
    name, _, options = spec.partition(":")
    given = dict(part.split("=", 1) for part in options.split(",")) if options and "(" not in options else {}
    match name:
        case "bsp" if not {"backup", "fraction"} & given.keys():
            return Judge(gap=0, fresh=True)
        case "bsp" | "ksync" | "kbatch":
            return Judge(fresh=True)
        case "asp":
            return Judge(at_once=True)
        case "ssp":
            return Judge(gap=int(given.get("staleness", 3)) - (given.get("wait") == "at"), at_once=True)
        case "dssp" if given.get("bound", "gap") == "gap":
            return Judge(gap=int(given.get("high", 15)), at_once=True)
        case "dssp" if given["bound"] == "staleness" and not streamed:
            return Judge(during=int(given.get("high", 15)) + 1, at_once=True)
        case "dssp":
            return Judge(at_once=True)
        case "r2sp":
            groups = given.get("groups", "all")
            return Judge(ring=True, streamed=streamed, turns=int(groups) if groups.isdigit() else float("inf"))
    return Judge()
