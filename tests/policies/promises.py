"""The promises of each policy under any history."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from paceline.policies import Apply, Decision, Grant, Policy, Stream
from policies.any_driver import AnyDriver
from policies.promise import Promise, Task
from policies.specs import STREAMED


class GapAtMost(Promise):
    """A granted worker has completed at most `bound` iterations more than the slowest member."""

    def __init__(self, bound: int) -> None:
        self.bound = bound

    def granted(self, driver: AnyDriver, task: Task) -> None:
        gap = driver.progress[task.worker] - driver.slowest
        assert gap <= self.bound, (
            f"worker {task.worker} was granted {gap} ahead of the slowest; at most {self.bound} are allowed"
        )


class NeverBlocks(Promise):
    """Every member always holds a Grant."""

    def after(self, driver: AnyDriver, decisions: list[Decision]) -> None:
        assert driver.running.keys() == driver.progress.keys(), "a worker was made to wait"


class AppliesAtOnce(Promise):
    """Every update is applied or discarded when it arrives."""

    def after(self, driver: AnyDriver, decisions: list[Decision]) -> None:
        assert not driver.unsettled, "an update was left undecided"


class StalenessWithin(Promise):
    """An update is applied at most N−1 versions after the one it was computed from.

    N counts every member since the worker's Grant or, if streamed, since its Turn, when its model began to come back.
    `turns` returns the number of seats that take turns, if it is not the number of members.
    """

    def __init__(self, turns: Callable[[Policy], float] | None = None) -> None:
        self.turns = turns

    def after(self, driver: AnyDriver, decisions: list[Decision]) -> None:
        if self.turns:
            for task in [*driver.running.values(), *driver.unsettled.values()]:
                task.notes["turns"] = max(task.notes.get("turns", 0), self.turns(driver.policy))

    def applied(self, driver: AnyDriver, tasks: list[Task]) -> None:
        for task in tasks:
            bound = min(len(task.company), task.notes.get("turns", len(task.company))) - 1
            staleness = driver.version - task.base_version
            assert staleness <= bound, (
                f"worker {task.worker}'s update is {staleness} versions old; at most {bound} are allowed"
            )


class UpdatesDuringAnIteration(Promise):
    """While an iteration runs, each other incarnation of a worker pushes at most `bound` updates."""

    def __init__(self, bound: int) -> None:
        self.bound = bound

    def applied(self, driver: AnyDriver, tasks: list[Task]) -> None:
        for task in tasks:
            pushed = task.notes.get("pushed", Counter())
            most = max(pushed.values(), default=0)
            assert most <= self.bound, f"{most} updates of one worker came during worker {task.worker}'s iteration"
            others = max(len(pushed), len(task.company) - 1)
            staleness = driver.version - task.base_version
            assert staleness <= self.bound * others, f"worker {task.worker}'s update is {staleness} versions old"
            for other in driver.running.values():
                other.notes.setdefault("pushed", Counter())[task.worker, task.incarnation] += 1


class TurnsApart(Promise):
    """Two turns or starts are at least the policy's current gap apart."""

    def __init__(self, ring_policy: Callable[[Policy], Any] = lambda policy: policy) -> None:
        self.ring_policy = ring_policy

    def starts(self, driver: AnyDriver) -> None:
        self.last = -float("inf")

    def before(self, driver: AnyDriver) -> None:
        self.seats = len(self.ring_policy(driver.policy).ring)

    def after(self, driver: AnyDriver, decisions: list[Decision]) -> None:
        ring_policy = self.ring_policy(driver.policy)
        pace = ring_policy.pace.T or 0.0
        # The ring may have grown or shrunk during this event. Take the shorter gap.
        gap = ring_policy.relax * pace / max(self.seats, len(ring_policy.ring), 1)
        applied: set[int] = set()
        for decision in decisions:
            match decision:
                case Apply(updates):
                    applied = {update.worker for update in updates}
                    is_turn = not driver.gated and bool(driver.progress)  # without members there are no gaps to keep
                case Grant(worker):
                    # A Grant without an Apply is a start. If streamed, a start may be late, after a push.
                    is_turn = worker not in applied and not driver.gated
                case Stream():
                    is_turn = driver.gated
                case _:
                    is_turn = False
            if is_turn:
                apart = driver.now - self.last
                assert apart >= gap * (1 - 1e-9) - 1e-9, f"two turns were {apart} s apart, and the gap is {gap} s"
                self.last = driver.now


class RingOrder(Promise):
    """The order of the ring is fixed, and turns are taken in that order.

    The policy's ring is taken as it is. The promise is that the seats that stay keep their order, that the turn follows
    this order, and that it skips only seats that have nothing to wait for or are overdue.
    """

    def starts(self, driver: AnyDriver) -> None:
        self.ring: list[int] = []  # seats, from the one that has the turn
        self.members: dict[int, set[int]] = {}
        self.pushing: deque[Task] = deque()  # in the order of their Turns

    def before(self, driver: AnyDriver) -> None:
        self.ring = [seat.number for seat in driver.policy.ring]  # type: ignore[attr-defined]
        self.members = {seat.number: set(seat.members) for seat in driver.policy.ring}  # type: ignore[attr-defined]
        self.seat_of = {worker: number for number, workers in self.members.items() for worker in workers}
        self.pace = driver.policy.pace.T  # type: ignore[attr-defined]
        self.granted_now: list[Task] = []
        self.turns: list[set[int]] = []  # the workers of each turn in this event

    def granted(self, driver: AnyDriver, task: Task) -> None:
        self.granted_now.append(task)

    def streamed(self, driver: AnyDriver, tasks: list[Task]) -> None:
        for task in tasks:
            task.notes["turned at"] = driver.now
        self.pushing.extend(tasks)
        self.turns.append({task.worker for task in tasks})

    def cancelled(self, driver: AnyDriver, task: Task) -> None:
        """A cancelled task has lost its turn while it computed, or its push is overdue."""
        policy: Any = driver.policy
        if not task.passed_over:
            overdue = driver.now - task.notes["turned at"]
            # This event may have changed T. At the moment of the Cancel, T was at least the smallest of these.
            least = (1 + policy.patience) * min(self.pace, *policy.pace._mean.values())
            assert overdue >= least * (1 - 1e-9), f"worker {task.worker}'s push was cancelled after {overdue} s"
            task.passed_over = True

    def applied(self, driver: AnyDriver, tasks: list[Task]) -> None:
        members = [task for task in tasks if not task.departed]  # updates of departed workers are applied with any turn
        if not driver.gated:
            self.turns.append({task.worker for task in members})
            return
        for task in members:
            while self.pushing and self.pushing[0] is not task:
                self.pushing.popleft().passed_over = (
                    True  # its worker left or hung during the push; it must not be applied later
                )
            assert self.pushing, f"worker {task.worker}'s update overtook another one"
            self.pushing.popleft()

    def after(self, driver: AnyDriver, decisions: list[Decision]) -> None:
        ring = [seat.number for seat in driver.policy.ring]  # type: ignore[attr-defined]
        stay = set(ring) & set(self.ring)
        was, now = [seat for seat in self.ring if seat in stay], [seat for seat in ring if seat in stay]
        assert _rotated(was, now), f"the ring's order changed from {was} to {now}"
        assert len(set(ring) - stay) <= 1, "one event added more than one seat"

        self._lose(driver)
        line = deque(self.ring)
        for workers in self.turns:
            seats = {self.seat_of[worker] for worker in workers}
            assert len(seats) <= 1, f"seats {seats} took one turn together"
            while seats and line[0] not in seats:
                self._pass_over(driver, line[0])
                line.rotate(-1)
            line.rotate(-1)
        line = deque(seat for seat in line if seat in stay)
        head = next((seat for seat in ring if seat in stay), None)
        while line and line[0] != head:
            self._pass_over(driver, line[0])
            line.rotate(-1)

    def _lose(self, driver: AnyDriver) -> None:
        """A worker that has just lost its turn must be overdue. Its update must be discarded."""
        policy: Any = driver.policy
        for worker in policy.lost:
            task = driver.running[worker]
            if not task.passed_over:
                overdue, least = driver.now - task.granted_at, (1 + policy.patience) * policy.pace.T
                assert overdue >= least * (1 - 1e-9), (
                    f"worker {worker} lost its turn after {overdue} s instead of {least} s"
                )
                task.passed_over = True

    def _pass_over(self, driver: AnyDriver, seat: int) -> None:
        """A seat that is passed over must have nothing to wait for."""
        for worker in self.members[seat]:
            waits = any(task.worker == worker and not task.departed for task in driver.unsettled.values())
            assert driver.gated or not waits, f"seat {seat} was passed over, although its update had arrived"
            task = driver.running.get(worker)
            if task is not None and task not in self.granted_now:
                assert task.passed_over, f"worker {worker} was overtaken"


def _rotated(a: list[int], b: list[int]) -> bool:
    """Return whether b is a rotation of a."""
    return any(a[i:] + a[:i] == b for i in range(max(1, len(a))))


def promises_of(spec: str) -> tuple[Promise, ...]:
    """Return the promises of a policy beyond those of every policy."""
    name, _, options = spec.removesuffix(STREAMED).partition(":")
    given: dict[str, str] = dict(
        part.split("=", 1) for part in options.split(",") if "=" in part and "(" not in options
    )
    match name:
        case "asp":
            return NeverBlocks(), AppliesAtOnce()
        case "bsp" if "backup" not in given and "fraction" not in given:
            return (GapAtMost(0),)
        case "ssp":
            return GapAtMost(int(given.get("staleness", 3)) - (given.get("wait") == "at")), AppliesAtOnce()
        case "dssp" if given.get("bound", "gap") == "gap":
            return GapAtMost(int(given.get("high", 15))), AppliesAtOnce()
        case "dssp" if given["bound"] == "staleness" and not spec.endswith(STREAMED):
            return UpdatesDuringAnIteration(int(given.get("high", 15)) + 1), AppliesAtOnce()
        case "dssp":
            return (AppliesAtOnce(),)
        case "r2sp" if "groups" not in given:
            return StalenessWithin(), TurnsApart(), RingOrder()
        case "r2sp" if given["groups"] == "auto":
            return StalenessWithin(lambda policy: len(policy.ring)), TurnsApart()  # type: ignore[attr-defined]
        case "r2sp":
            return StalenessWithin(lambda _: int(given["groups"])), TurnsApart(), RingOrder()
        case "fedbuff":
            return (NeverBlocks(),)
        case "fl-r2sp":
            groups = int(given.get("groups", 8))
            return StalenessWithin(lambda _: groups), GroupTurnsApart(), GroupOrder(groups), LateNeverCounts(groups)
        case "groups" if spec in ("groups", "groups:count=2,inner=(bsp:fraction=0.5)"):
            count = 4 if spec == "groups" else 2
            return (StalenessWithin(lambda _: count), GroupTurnsApart())
    return ()


class GroupTurnsApart(TurnsApart):
    """As `TurnsApart`, for groups whose outer policy is R²SP. A turn is an Apply."""

    def __init__(self) -> None:
        super().__init__(lambda policy: policy.outer)  # type: ignore[attr-defined]

    def after(self, driver: AnyDriver, decisions: list[Decision]) -> None:
        super().after(driver, [decision for decision in decisions if isinstance(decision, Apply)])


class GroupOrder(Promise):
    """Groups refine the model in a fixed order, one at a time. No group is passed over while its update waits."""

    def __init__(self, groups: int) -> None:
        self.groups = groups

    def before(self, driver: AnyDriver) -> None:
        outer = driver.policy.outer  # type: ignore[attr-defined]
        self.ring = [group for seat in outer.ring for group in seat.members]  # from the one that has the turn
        self.waiting = set(outer.waiting)
        self.turns: list[int] = []

    def applied(self, driver: AnyDriver, tasks: list[Task]) -> None:
        groups = {task.worker % self.groups for task in tasks if not task.departed}
        assert len(groups) <= 1, f"groups {groups} refined the model together"
        self.turns += groups

    def after(self, driver: AnyDriver, decisions: list[Decision]) -> None:
        outer = driver.policy.outer  # type: ignore[attr-defined]
        ring = [group for seat in outer.ring for group in seat.members]
        stay = set(ring) & set(self.ring)
        was, now = [group for group in self.ring if group in stay], [group for group in ring if group in stay]
        assert _rotated(was, now), f"the order of groups changed from {was} to {now}"
        line = deque(self.ring)
        for group in self.turns:
            while line and line[0] != group:
                assert line[0] not in self.waiting, f"group {line[0]} was passed over while its update waited"
                line.rotate(-1)
            line.rotate(-1)


class LateNeverCounts(Promise):
    """An update only counts in the round of its group in which its worker was granted."""

    def __init__(self, groups: int) -> None:
        self.groups = groups

    def starts(self, driver: AnyDriver) -> None:
        self.rounds: dict[int, int] = dict.fromkeys(range(self.groups), 0)

    def granted(self, driver: AnyDriver, task: Task) -> None:
        task.notes["round"] = self.rounds[task.worker % self.groups]

    def applied(self, driver: AnyDriver, tasks: list[Task]) -> None:
        tasks = [task for task in tasks if not task.departed]  # updates of departed workers arrived in time
        for task in tasks:
            now = self.rounds[task.worker % self.groups]
            assert task.notes["round"] == now, f"worker {task.worker}'s update of round {task.notes['round']} came late"
        for group in {task.worker % self.groups for task in tasks}:
            self.rounds[group] += 1
