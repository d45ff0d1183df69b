"""A driver that does whatever the contract allows, and a judge of every answer it gets.

`AnyDriver` keeps its own books: who is a member, who holds a Grant, which updates have arrived and are not settled,
which version the model has. It takes nothing from the library but the decisions themselves, so a policy cannot agree
with a mistake of its own. Whoever holds an `AnyDriver` chooses what happens next, and when; each method is one thing
that a real cluster might do.
"""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.policies import (
    Add,
    Apply,
    Cancel,
    Decision,
    Discard,
    Grant,
    Keep,
    Policy,
    Stream,
    Turn,
    Update,
    WakeAt,
    load,
    save,
)

WAKES_AT_ONE_STRETCH = 2_000  # more than this without anything else happening is a policy that spins


class Broken(AssertionError):
    """A promise was broken."""


def require(kept: bool, message: str) -> None:
    if not kept:
        raise Broken(message)


@dataclass(eq=False)
class Task:
    """One Grant, and what came of it."""

    worker: int
    incarnation: int
    iteration: int
    base_version: int
    batch_size: int
    granted_at: float
    company: set[int]  # every id that was a member at any time since its model came, or began to come, to the worker
    computed_at: float | None = None  # when the worker was ready to push
    turn: bool = False  # may it push?
    cancelled: bool = False
    departed: bool = False  # its worker left after the update had arrived
    passed_over: bool = False  # it lost its turn: whatever it brings must be discarded
    gone: bool = False  # its worker left before the update had arrived
    stream: Stream | None = None  # what was said of how it is applied
    notes: dict[str, Any] = field(default_factory=dict)  # for promises to write on


class Promise:
    """Something a policy keeps for any history. Each method looks on at one kind of moment."""

    def starts(self, driver: AnyDriver) -> None: ...
    def before(self, driver: AnyDriver) -> None: ...
    def granted(self, driver: AnyDriver, task: Task) -> None: ...
    def turned(self, driver: AnyDriver, task: Task) -> None: ...
    def cancelled(self, driver: AnyDriver, task: Task) -> None: ...
    def applied(self, driver: AnyDriver, tasks: list[Task]) -> None: ...
    def after(self, driver: AnyDriver, decisions: list[Decision]) -> None: ...


class AnyDriver:
    def __init__(self, make: Callable[[], Policy], promises: tuple[Promise, ...] = ()) -> None:
        self.make = make
        self.policy = make()
        self.gated = self.policy.streamed  # does a worker wait for its Turn before it pushes?
        self.in_slices = self.policy.streamed or self.policy.pipelined  # are they applied as they come, by a Stream?
        self.promises = promises

        self.now = 0.0
        self.version = 0
        self.wake: float | None = None
        self.progress: dict[int, int] = {}  # member → completed iterations
        self.incarnations: Counter[int] = Counter()  # worker → how often it has joined
        self.iterations: dict[int, int] = {}  # member → Grants since it joined
        self.running: dict[int, Task] = {}  # member → its unanswered Grant
        self.latest: dict[int, Task] = {}  # member → its last Grant
        self.since: dict[int, set[int]] = {}  # gated: member → every id that was one since it last asked for a model
        self.streams: list[tuple[Stream, list[Task]]] = []  # in the order in which they were told, until applied
        self.cancelled: list[Task] = []  # whose answers may still come
        self.unsettled: dict[Update, Task] = {}
        self.kept: dict[int, tuple[Update, Task]] = {}  # slot → what is there
        self.sums: dict[int, list[tuple[Update, float]]] = {}  # running sums, and what was added to them
        self.spoilt: set[int] = set()  # those of which something was discarded
        self.seen: Counter[str] = Counter()  # decisions by kind
        self.applications: Counter[int] = Counter()  # updates applied, by worker

        self.log: list[tuple[str, tuple[Any, ...], list[Decision]]] = []
        self.shadows: list[Policy] = []
        self.broken = False
        for promise in promises:
            promise.starts(self)

    # What may happen

    def joins(self, worker: int) -> None:
        assert worker not in self.progress
        self.progress[worker] = self.slowest
        self.incarnations[worker] += 1
        self.iterations[worker] = 0
        tasks = [*self.running.values(), *self.unsettled.values()]
        for company in [*(task.company for task in tasks), *self.since.values()]:
            company.add(worker)
        self._asks_for_a_model(worker)
        self._tell("joined", worker, self.now)

    def leaves(self, worker: int) -> None:
        del self.progress[worker], self.iterations[worker]
        self.latest.pop(worker, None)
        self.since.pop(worker, None)
        if running := self.running.pop(worker, None):
            running.gone = True
        self.cancelled = [task for task in self.cancelled if task.worker != worker]
        for task in self.unsettled.values():
            task.departed |= task.worker == worker
        self._tell("left", worker, self.now)

    def computes(self, task: Task) -> None:
        """The task's gradient is there, and its worker asks to push it."""
        assert task.computed_at is None
        task.computed_at = self.now
        self._tell("ready", task.worker, task.batch_size, self.now)

    def pushes(self, task: Task) -> None:
        """The task's whole update is in."""
        assert task.computed_at is not None and task.turn
        if task.cancelled:
            self.cancelled.remove(task)
        else:
            del self.running[task.worker]
            self.progress[task.worker] += 1
        update = Update(
            worker=task.worker,
            iteration=task.iteration,
            base_version=task.base_version,
            batch_size=task.batch_size,
            compute_seconds=task.computed_at - task.granted_at,
            incarnation=task.incarnation,
        )
        assert update not in self.unsettled
        self.unsettled[update] = task
        self._tell("arrived", update, self.now)

    def answers(self, task: Task) -> None:
        """Compute and push, as far as the policy lets it now."""
        if task.computed_at is None:
            self.computes(task)
        if task.turn and (self.running.get(task.worker) is task or task in self.cancelled):
            self.pushes(task)

    def time_passes(self, seconds: float, dutiful: bool = True) -> None:
        """Wakes that come due on the way are delivered; one that is due at the very end only by a dutiful driver."""
        until = self.now + seconds
        for _ in range(WAKES_AT_ONE_STRETCH):
            if self.wake is None or self.wake > until or (self.wake == until and not dutiful):
                break
            self.now, self.wake = max(self.now, self.wake), None
            self._tell("woke", self.now)
        else:
            raise Broken("the policy asks to be woken over and over, and nothing comes of it")
        self.now = until

    def wakes_for_no_reason(self) -> None:
        self._tell("woke", self.now)

    def copies(self) -> None:
        """From here on a copy of the policy is told the same, and must say the same."""
        self.shadows.append(copy.deepcopy(self.policy))

    def saves_and_loads(self) -> None:
        """As `copies`, by way of a file."""
        self.shadows.append(load(json.loads(json.dumps(save(self.policy)))))

    # How a history ends

    def waiting_for_turn(self, task: Task) -> bool:
        return task.computed_at is not None and not task.turn

    def calms_down(self, seconds: float, done: Callable[[], bool], steps: int) -> None:
        """From now on everyone answers `seconds` after its Grant, and wakes come when they are due."""
        for _ in range(steps):
            if done():
                return
            busy = [task for task in self.running.values() if not self.waiting_for_turn(task)]
            task = min(busy, key=lambda task: task.granted_at, default=None)
            due = math.inf if task is None else max(self.now, task.granted_at + seconds)
            if self.wake is not None and self.wake <= due:
                self.time_passes(max(0.0, self.wake - self.now))
                if self.wake is not None and self.wake <= self.now:  # rounding: now + (wake − now) fell short
                    self.now = math.nextafter(self.wake, math.inf)
                    self.time_passes(0.0)
                continue
            require(task is not None, "nobody runs and no wake is set")
            assert task is not None
            self.time_passes(due - self.now)
            if self.running.get(task.worker) is task:
                self.answers(task)
        require(done(), f"still not there after {steps} steps of a calm driver")

    def everyone_leaves(self) -> None:
        """Then nothing that arrived may be left lying."""
        for worker in list(self.progress):
            self.leaves(worker)
        for _ in range(100):
            if self.wake is None:
                break
            self.time_passes(max(0.0, math.nextafter(self.wake, math.inf) - self.now))
        left_lying = list(self.unsettled)
        require(not left_lying, f"everyone has left, and these were never applied or discarded: {left_lying}")

    def replays(self) -> None:
        """The same events, told to a fresh policy, give the same decisions."""
        fresh = self.make()
        for method, arguments, decisions in self.log:
            again = getattr(fresh, method)(*arguments)
            require(again == decisions, f"replayed, {method}{arguments} gave {again} instead of {decisions}")

    # The judge

    @property
    def slowest(self) -> int:
        """The least progress of those who have ever been granted; the others start there, and hold nobody back."""
        begun = [done for worker, done in self.progress.items() if self.iterations[worker]]
        return min(begun, default=0)

    def _asks_for_a_model(self, worker: int) -> None:
        """From here on it may come: with a push, where that is streamed, or when there is room for a start."""
        if self.gated:
            self.since[worker] = set(self.progress)

    def _tell(self, method: str, *arguments: Any) -> None:
        self.broken = True  # until it is through
        for promise in self.promises:
            promise.before(self)
        decisions = list(getattr(self.policy, method)(*arguments))
        self.log.append((method, arguments, decisions))
        for shadow in self.shadows:
            said = getattr(shadow, method)(*arguments)
            require(said == decisions, f"a copy answered {method}{arguments} with {said} instead of {decisions}")
        for decision in decisions:
            self.seen[type(decision).__name__] += 1
            self._judge(decision)
        if self.progress:
            require(
                bool(self.running) or self.wake is not None, "there are members, but nobody runs and no wake is set"
            )
        for promise in self.promises:
            promise.after(self, decisions)
        self.broken = False

    def _judge(self, decision: Decision) -> None:
        match decision:
            case Grant(worker, batch_size):
                require(worker in self.progress, f"{decision} goes to one who is no member")
                require(worker not in self.running, f"{decision} goes to one who has a Grant already")
                require(batch_size is None or batch_size >= 1, f"{decision}: no such batch")
                if not self.iterations[worker]:
                    self.progress[worker] = self.slowest
                self.iterations[worker] += 1
                self.running[worker] = self.latest[worker] = task = Task(
                    worker=worker,
                    incarnation=self.incarnations[worker],
                    iteration=self.iterations[worker],
                    base_version=self.version,
                    batch_size=batch_size or 32 + 16 * (worker % 3),
                    granted_at=self.now,
                    company=self.progress.keys() | self.since.get(worker, set()),
                )
                for promise in self.promises:
                    promise.granted(self, task)
            case Cancel(worker):
                require(worker in self.running, f"{decision}, but it runs nothing")
                task = self.running.pop(worker)
                task.cancelled = True
                if task.turn or not self.gated:  # where a Turn gates the push, one cancelled without it never pushes
                    self.cancelled.append(task)
                self._asks_for_a_model(worker)
                for promise in self.promises:
                    promise.cancelled(self, task)
            case Turn(worker):
                waiting = [t for t in [*self.cancelled, *self.running.values()] if t.worker == worker]
                waiting = [task for task in waiting if self.waiting_for_turn(task)]
                require(bool(waiting), f"{decision}, but it did not ask for one")
                for task in waiting:
                    task.turn = True
                    self._asks_for_a_model(worker)
                    for promise in self.promises:
                        promise.turned(self, task)
            case Stream():
                self._judge_stream(decision)
            case Add(update, number, weight):
                require(update in self.unsettled, f"{decision}: {update} has not arrived, or was settled before")
                require(0 < weight < math.inf, f"{decision}: such a weight cannot be")
                self.sums.setdefault(number, []).append((update, weight))
            case Discard(update):
                task = self._settle(update, decision)
                self._spoil(update)
                require(task.stream is None or task.cancelled, f"{decision}, but it was streamed, and may be applied")
            case Keep(update, slot):
                require(not self.in_slices, f"{decision}, but its slices may be applied")
                self.kept[slot] = (update, self._settle(update, decision))
            case Apply(updates, weights, mix, sums):
                require(len(updates) > 0, "an Apply of nothing")
                if sums:
                    self._judge_sums(decision)
                require(len(updates) == len(weights), f"{decision}: one weight for each update, please")
                require(all(0 < weight < math.inf for weight in weights), f"{decision}: such weights cannot be")
                require(mix is None or 0 < mix <= 1, f"{decision}: such a mix cannot be")
                kept = dict(self.kept.values())
                tasks = [kept[update] if update in kept else self._settle(update, decision) for update in updates]
                for task in tasks:
                    require(not task.passed_over, f"{decision}: worker {task.worker} had lost this turn")
                    require(not task.cancelled, f"{decision}: worker {task.worker} had been cancelled")
                if self.in_slices:
                    self._judge_slices(decision, tasks)
                for promise in self.promises:
                    promise.applied(self, tasks)
                self.applications.update(task.worker for task in tasks)
                self.version += 1
            case WakeAt(time):
                require(self.now < time < math.inf, f"{decision} at {self.now}")
                self.wake = time

    def _judge_sums(self, apply: Apply) -> None:
        """What was added up is all that is applied, and comes to the same."""
        added: list[tuple[Update, float]] = []
        for number, factor in apply.sums:
            require(number in self.sums and number not in self.spoilt, f"{apply}: there is no such sum")
            added += [(update, factor * weight) for update, weight in self.sums.pop(number)]
        said = sorted(zip(apply.updates, apply.weights, strict=True), key=repr)
        for (one, weight), (other, its) in zip(sorted(added, key=repr), said, strict=True):
            require(one == other and abs(weight - its) <= 1e-9 * its, f"{apply}: the sums are of something else")

    def _spoil(self, update: Update) -> None:
        for number, added in list(self.sums.items()):
            for entry in added:
                if entry[0] == update:
                    added.remove(entry)
                    self.spoilt.add(number)
                    if not added:
                        del self.sums[number]
                        self.spoilt.discard(number)
                    return

    def _judge_stream(self, stream: Stream) -> None:
        """Before its slices flow: of members who are ready, each once."""
        require(self.in_slices, f"{stream}, but updates are applied whole")
        require(len(stream.workers) == len(stream.weights) > 0, f"{stream}: one weight for each worker, please")
        require(all(0 < weight < math.inf for weight in stream.weights), f"{stream}: such weights cannot be")
        tasks = []
        for worker in stream.workers:
            task = self.latest.get(worker)
            require(task is not None and task.computed_at is not None, f"{stream}: worker {worker} is not ready")
            assert task is not None
            require(task.turn and not task.cancelled, f"{stream}: worker {worker} may not push")
            require(task.stream is None, f"{stream}: worker {worker}'s update is streamed already")
            task.stream = stream
            tasks.append(task)
        self.streams.append((stream, tasks))

    def _judge_slices(self, apply: Apply, tasks: list[Task]) -> None:
        """An Apply only says that all of one Stream is in."""
        stream = tasks[0].stream
        require(stream is not None, f"{apply}, but worker {tasks[0].worker}'s update was not streamed")
        assert stream is not None
        place = next(i for i, (each, _) in enumerate(self.streams) if each is stream)
        weights = dict(zip(stream.workers, stream.weights, strict=True))
        alive = [task for task in self.streams[place][1] if not (task.cancelled or task.gone)]
        require(tasks == alive, f"{apply} is not of those of {stream} who are left, in its order")
        wanted = tuple(weights[task.worker] for task in tasks)
        require(apply.weights == wanted, f"{apply}, but the weights of the Stream were {wanted}")
        if stream.in_order:
            earlier = [task for each, tasks in self.streams[:place] if each.in_order for task in tasks]
            overtaken = [task.worker for task in earlier if not (task.cancelled or task.gone)]
            require(not overtaken, f"{apply} overtook what was streamed before, of workers {overtaken}")
        del self.streams[place]

    def _settle(self, update: Update, decision: Decision) -> Task:
        require(update in self.unsettled, f"{decision}: {update} has not arrived, or was settled before")
        return self.unsettled.pop(update)
