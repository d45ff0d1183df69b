"""A driver that can do everything the contract allows, and that judges every decision of its policy.

`AnyDriver` keeps its own records: the members, their Grants, the updates that have arrived and are not settled, and the
version of the model. It uses nothing of the library but the decisions, so a policy's own mistakes cannot hide there.
The test chooses what happens next, and when. Each method is one event of a real cluster.
"""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable
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
from policies.promise import Promise, Task
from policies.running_sums import RunningSums

MAX_WAKES = 2_000  # wakes without another event; a policy that needs more spins


class AnyDriver:
    """Drives one policy, and checks the contract and the given promises."""

    def __init__(self, make: Callable[[], Policy], promises: tuple[Promise, ...] = ()) -> None:
        self.make = make
        self.policy = make()
        self.gated = self.policy.streamed  # whether a worker waits for its Turn before it pushes
        self.in_slices = self.policy.streamed or self.policy.pipelined  # whether a Stream applies slices as they arrive
        self.promises = promises

        self.now = 0.0
        self.version = 0
        self.wake: float | None = None
        self.progress: dict[int, int] = {}  # member → number of completed iterations
        self.incarnations: Counter[int] = Counter()  # worker → how often it has joined
        self.iterations: dict[int, int] = {}  # member → number of Grants since it joined
        self.running: dict[int, Task] = {}  # member → its unanswered Grant
        self.latest: dict[int, Task] = {}  # member → its last Grant
        self.since: dict[int, set[int]] = {}  # gated: member → every member since it asked for a model
        self.streams: list[tuple[Stream, list[Task]]] = []  # Streams that are not applied yet, in order
        self.cancelled: list[Task] = []  # cancelled tasks whose updates may still arrive
        self.unsettled: dict[Update, Task] = {}
        self.kept: dict[int, tuple[Update, Task]] = {}  # slot → the kept update
        self.sums = RunningSums()
        self.seen: Counter[str] = Counter()  # number of decisions by kind
        self.applications: Counter[int] = Counter()  # number of applied updates by worker

        self.log: list[tuple[str, tuple[Any, ...], list[Decision]]] = []
        self.shadows: list[Policy] = []
        self.broken = False
        for promise in promises:
            promise.starts(self)

    # Events

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
        """The worker has computed the task's gradient and asks to push it."""
        assert task.computed_at is None
        task.computed_at = self.now
        self._tell("ready", task.worker, task.batch_size, self.now)

    def pushes(self, task: Task) -> None:
        """The task's whole update arrives."""
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

    def can_be_held(self, task: Task) -> bool:
        """Return whether the servers may hold all of a task's update, and wait for others of its Stream."""
        others = next((tasks for stream, tasks in self.streams if stream is task.stream), [])
        return self.running.get(task.worker) is task and len(others) > 1

    def holds(self, task: Task) -> None:
        """All of the task's update is at the servers, which wait for others of its Stream."""
        task.held = True
        self._tell("measured", "held", task.worker, 1.0, self.now)

    def answers(self, task: Task) -> None:
        """The worker computes and, if the policy lets it, pushes."""
        if task.computed_at is None:
            self.computes(task)
        if task.turn and (self.running.get(task.worker) is task or task in self.cancelled):
            self.pushes(task)

    def time_passes(self, seconds: float, dutiful: bool = True) -> None:
        """Time passes. WakeAts that come due are delivered; one due at the very end only if the driver is dutiful."""
        until = self.now + seconds
        for _ in range(MAX_WAKES):
            if self.wake is None or self.wake > until or (self.wake == until and not dutiful):
                break
            self.now, self.wake = max(self.now, self.wake), None
            self._tell("woke", self.now)
        else:
            raise AssertionError("the policy asks to be woken again and again without an effect")
        self.now = until

    def wakes_for_no_reason(self) -> None:
        self._tell("woke", self.now)

    def copies(self) -> None:
        """Copy the policy. From here on the copy sees the same events and must make the same decisions."""
        self.shadows.append(copy.deepcopy(self.policy))

    def saves_and_loads(self) -> None:
        """As `copies`, but by saving the policy and loading it."""
        self.shadows.append(load(json.loads(json.dumps(save(self.policy)))))

    # The end of a history

    def waiting_for_turn(self, task: Task) -> bool:
        return task.computed_at is not None and not task.turn

    def calms_down(self, seconds: float, done: Callable[[], bool], steps: int) -> None:
        """Let every worker answer `seconds` after its Grant, and deliver WakeAts on time, until `done`."""
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
            assert task is not None, "no member runs and no WakeAt is set"
            self.time_passes(due - self.now)
            if self.running.get(task.worker) is task:
                self.answers(task)
        assert done(), f"not done after {steps} steps of a calm driver"

    def everyone_leaves(self) -> None:
        """Let all members leave. Then every update must be settled."""
        for worker in list(self.progress):
            self.leaves(worker)
        for _ in range(100):
            if self.wake is None:
                break
            self.time_passes(max(0.0, math.nextafter(self.wake, math.inf) - self.now))
        undecided = list(self.unsettled)
        assert not undecided, f"all members have left, and these were never applied or discarded: {undecided}"

    def replays(self) -> None:
        """Give the same events to a fresh policy. It must make the same decisions."""
        fresh = self.make()
        for method, arguments, decisions in self.log:
            again = getattr(fresh, method)(*arguments)
            assert again == decisions, f"replaying {method}{arguments} gave {again} instead of {decisions}"

    # The judge

    @property
    def slowest(self) -> int:
        """The least progress of the members that have been granted. Other members start there when they are."""
        begun = [done for worker, done in self.progress.items() if self.iterations[worker]]
        return min(begun, default=0)

    def _asks_for_a_model(self, worker: int) -> None:
        """From here on a worker's next model may come: with its streamed push, or when it starts."""
        if self.gated:
            self.since[worker] = set(self.progress)

    def _tell(self, method: str, *arguments: Any) -> None:
        self.broken = True  # until this event is judged
        for promise in self.promises:
            promise.before(self)
        decisions = list(getattr(self.policy, method)(*arguments))
        self.log.append((method, arguments, decisions))
        for shadow in self.shadows:
            copied = getattr(shadow, method)(*arguments)
            assert copied == decisions, f"a copy answered {method}{arguments} with {copied} instead of {decisions}"
        for decision in decisions:
            self.seen[type(decision).__name__] += 1
            self._judge(decision)
        if self.progress:
            assert self.running or self.wake is not None, "there are members, but none runs and no WakeAt is set"
        for promise in self.promises:
            promise.after(self, decisions)
        self.broken = False

    def _judge(self, decision: Decision) -> None:
        match decision:
            case Grant(worker, batch_size):
                assert worker in self.progress, f"{decision} goes to a worker that is no member"
                assert worker not in self.running, f"{decision} goes to a worker that already has a Grant"
                assert batch_size is None or batch_size >= 1, f"{decision}: invalid batch size"
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
                assert worker in self.running, f"{decision}, but the worker runs no iteration"
                task = self.running.pop(worker)
                assert not task.held, f"{decision}, but the servers hold its whole update"
                task.cancelled = True
                if task.turn or not self.gated:  # a gated task without a Turn never pushes
                    self.cancelled.append(task)
                self._asks_for_a_model(worker)
                for promise in self.promises:
                    promise.cancelled(self, task)
            case Turn(worker):
                waiting = [t for t in [*self.cancelled, *self.running.values()] if t.worker == worker]
                waiting = [task for task in waiting if self.waiting_for_turn(task)]
                assert waiting, f"{decision}, but the worker did not ask for one"
                for task in waiting:
                    task.turn = True
                    self._asks_for_a_model(worker)
            case Stream():
                self._judge_stream(decision)
            case Add(update, number, weight):
                assert update in self.unsettled, f"{decision}: {update} has not arrived or is settled already"
                assert 0 < weight < math.inf, f"{decision}: invalid weight"
                self.sums.add(update, number, weight)
            case Discard(update):
                task = self._settle(update, decision)
                self.sums.discard(update)
                assert task.stream is None or task.cancelled, f"{decision}, but it was streamed and may be applied"
            case Keep(update, slot):
                assert not self.in_slices, f"{decision}, but its slices may be applied"
                self.kept[slot] = (update, self._settle(update, decision))
            case Apply(updates, weights, mix, sums):
                assert len(updates) > 0, "an Apply without updates"
                if sums:
                    self.sums.check(decision)
                assert len(updates) == len(weights), f"{decision}: each update needs one weight"
                assert all(0 < weight < math.inf for weight in weights), f"{decision}: invalid weights"
                assert mix is None or 0 < mix <= 1, f"{decision}: invalid mix"
                kept = dict(self.kept.values())
                tasks = [kept[update] if update in kept else self._settle(update, decision) for update in updates]
                for task in tasks:
                    assert not task.passed_over, f"{decision}: worker {task.worker} had lost this turn"
                    assert not task.cancelled, f"{decision}: worker {task.worker} had been cancelled"
                if self.in_slices:
                    self._judge_slices(decision, tasks)
                for promise in self.promises:
                    promise.applied(self, tasks)
                self.applications.update(task.worker for task in tasks)
                self.version += 1
            case WakeAt(time):
                assert self.now < time < math.inf, f"{decision} at {self.now}"
                self.wake = time

    def _judge_stream(self, stream: Stream) -> None:
        """A Stream must name members that are ready and may push, each once."""
        assert self.in_slices, f"{stream}, but updates are applied whole"
        assert len(stream.workers) == len(stream.weights) > 0, f"{stream}: each worker needs one weight"
        assert all(0 < weight < math.inf for weight in stream.weights), f"{stream}: invalid weights"
        tasks = []
        for worker in stream.workers:
            task = self.latest.get(worker)
            assert task is not None and task.computed_at is not None, f"{stream}: worker {worker} is not ready"
            assert task.turn and not task.cancelled, f"{stream}: worker {worker} may not push"
            assert task.stream is None, f"{stream}: worker {worker}'s update is already streamed"
            task.stream = stream
            tasks.append(task)
        self.streams.append((stream, tasks))
        for promise in self.promises:
            promise.streamed(self, tasks)

    def _judge_slices(self, apply: Apply, tasks: list[Task]) -> None:
        """An Apply must name the remaining updates of one Stream, in order and with its weights."""
        stream = tasks[0].stream
        assert stream is not None, f"{apply}, but worker {tasks[0].worker}'s update was not streamed"
        place = next(i for i, (each, _) in enumerate(self.streams) if each is stream)
        weights = dict(zip(stream.workers, stream.weights, strict=True))
        alive = [task for task in self.streams[place][1] if not (task.cancelled or task.gone)]
        assert tasks == alive, f"{apply} does not name the remaining updates of {stream}, in its order"
        wanted = tuple(weights[task.worker] for task in tasks)
        assert apply.weights == wanted, f"{apply}, but the weights of the Stream were {wanted}"
        if stream.in_order:
            earlier = [task for each, tasks in self.streams[:place] if each.in_order for task in tasks]
            overtaken = [task.worker for task in earlier if not (task.cancelled or task.gone)]
            assert not overtaken, f"{apply} overtook earlier Streams, of workers {overtaken}"
        del self.streams[place]

    def _settle(self, update: Update, decision: Decision) -> Task:
        assert update in self.unsettled, f"{decision}: {update} has not arrived or is settled already"
        return self.unsettled.pop(update)
