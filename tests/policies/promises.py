"""What each policy promises for any history, and which policies the suites run over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from paceline.policies import Apply, Decision, Grant, Policy, Turn, make, names
from policies.anydriver import AnyDriver, Promise, Task, require

STREAMED = " streamed"  # written after a spec: the driver applies slices as they come

VARIANTS = [
    "bsp:backup=1",
    "bsp:fraction=0.5",
    "bsp:tune_batches=true",
    "bsp:weights=mean",
    "bsp:pipeline=true",
    "bsp:pipeline=true,weights=mean",
    "bsp:pipeline=true,tune_batches=true",
    "ksync:k=2",
    "kbatch:k=2",
    "asp:weights=mean",
    "asp" + STREAMED,
    "asp:weights=mean" + STREAMED,
    "ssp:staleness=0",
    "ssp:staleness=1",
    "ssp:staleness=1,weights=mean" + STREAMED,
    "dssp:low=1,high=3",
    "dssp:low=1,high=3,weights=mean" + STREAMED,
    "dssp:low=1,high=3,bounded=false",
    "dssp:low=2,high=2",
    "r2sp:groups=2",
    "r2sp:groups=3,patience=0.5",
    "r2sp:groups=auto",
    "r2sp:tune_batches=true",
    "r2sp:relax=1.5,patience=0.3,weights=mean",
    "r2sp" + STREAMED,
    "r2sp:patience=0.5,tune_batches=true" + STREAMED,
    "r2sp:relax=0.3,patience=0.3,weights=mean" + STREAMED,
    "safa:lag=1",
    "safa:limit=3",
    "safa:fraction=1,lag=0,limit=0.5",
    "bsp:fraction=0.5,weights=equal",
    "bsp:running=true",
    "bsp:fraction=0.5,weights=mean,running=true",
    "groups:count=2,inner=(bsp:fraction=0.5,running=true),outer=(ksync:k=1)",
    "groups:count=3,inner=(bsp:running=true,weights=equal),outer=bsp",
    "filtered:policy=(bsp:running=true)",
    "fedbuff:k=3,discount=0",
    "filtered:policy=(r2sp:groups=2)",
    "filtered:policy=r2sp",
    "fl-r2sp:groups=2,fraction=0.5",
    "fl-r2sp:groups=3,moves=model,patience=0.5,filter=false",
    "fl-r2sp:groups=3,fraction=0.8,weights=equal,relax=0.7",
    "groups:count=2,inner=(bsp:fraction=0.5)",
    "groups:count=3,inner=asp,outer=r2sp",
    "groups:count=2,inner=bsp,outer=(ssp:staleness=1)",
    "groups:count=2,inner=asp,outer=(ssp:staleness=0)",
    "groups:count=3,inner=bsp,outer=(ksync:k=2)",
    "groups:count=3,inner=(ksync:k=1),outer=(ksync:k=2)",
    "groups:count=3,inner=(kbatch:k=2),outer=(kbatch:k=2)",
    "groups:count=2,inner=bsp,outer=safa",
    "groups:count=3,inner=asp,outer=(safa:lag=0,limit=3)",
    "groups:count=2,inner=(r2sp:groups=2),outer=bsp",
    "groups:count=2,inner=r2sp,outer=r2sp",
    "groups:count=3,inner=r2sp,outer=(ksync:k=1)",
    "groups:count=2,inner=safa,outer=r2sp",
    "groups:count=3,inner=(safa:lag=0,limit=2),outer=(ksync:k=2)",
    "groups:count=2,inner=(groups:count=3,inner=asp,outer=bsp),outer=(dssp:low=1,high=3)",
]
SPECS = [*names(), *VARIANTS]

# Here every member's update is applied again and again, if everyone takes the same time.
ALL_ARE_APPLIED = [
    *("asp", "asp:weights=mean", "asp" + STREAMED, "asp:weights=mean" + STREAMED),
    *("bsp", "bsp:tune_batches=true", "bsp:weights=mean", "bsp:pipeline=true", "bsp:pipeline=true,weights=mean"),
    *("ssp", "ssp:staleness=0", "ssp:staleness=1"),
    *("dssp", "dssp:low=1,high=3", "dssp:low=1,high=3,bounded=false", "dssp:low=2,high=2"),
    *("r2sp", "r2sp:groups=2", "r2sp:groups=auto", "r2sp:tune_batches=true", "r2sp" + STREAMED),
]
# Here some may have to wait for very long. When the fastest group cancels the others, their rings start anew with a
# pilot, who may never be done in time; and a group whose ring is slow from hard times is left behind by the others.
MAY_WAIT_LONG = ["groups:count=3,inner=r2sp,outer=(ksync:k=1)", "groups:count=2,inner=r2sp,outer=r2sp"]


def fresh(spec: str) -> Callable[[], Policy]:
    """A maker of new policies, told how updates will be applied."""

    def made() -> Policy:
        policy = make(spec.removesuffix(STREAMED))
        if spec.endswith(STREAMED):
            assert policy.streamable
            policy.streamed = True
        return policy

    return made


class GapAtMost(Promise):
    """Nobody is granted who has completed more than `bound` iterations more than the slowest member."""

    def __init__(self, bound: int) -> None:
        self.bound = bound

    def granted(self, driver: AnyDriver, task: Task) -> None:
        gap = driver.progress[task.worker] - driver.slowest
        require(gap <= self.bound, f"worker {task.worker} was granted {gap} ahead of the slowest, not {self.bound}")


class NeverBlocks(Promise):
    """Every member holds a Grant, always."""

    def after(self, driver: AnyDriver, decisions: list[Decision]) -> None:
        require(driver.running.keys() == driver.progress.keys(), "somebody was made to wait")


class AppliesAtOnce(Promise):
    """Nothing that has arrived is left lying."""

    def after(self, driver: AnyDriver, decisions: list[Decision]) -> None:
        require(not driver.unsettled, "an update was left lying")


class StalenessWithin(Promise):
    """An update is applied at most N−1 versions after the one it was computed from.

    N counts every member seen since the worker's Grant, or streamed since its Turn, when its model began to come back;
    `turns` says how many take turns if that is not everyone.
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
            require(staleness <= bound, f"worker {task.worker}'s update is {staleness} versions old, not {bound}")


class TurnsApart(Promise):
    """Two turns, or starts, are at least the gap apart that the policy states at that moment."""

    def __init__(self, ring_policy: Callable[[Policy], Any] = lambda policy: policy) -> None:
        self.ring_policy = ring_policy

    def starts(self, driver: AnyDriver) -> None:
        self.last = -float("inf")

    def before(self, driver: AnyDriver) -> None:
        self.seats = len(self.ring_policy(driver.policy).ring)

    def after(self, driver: AnyDriver, decisions: list[Decision]) -> None:
        ring_policy = self.ring_policy(driver.policy)
        pace = ring_policy.pace.T or 0.0
        # The ring may have grown or shrunk while the policy answered: take the shorter gap of the two.
        gap = ring_policy.relax * pace / max(self.seats, len(ring_policy.ring), 1)
        applied: set[int] = set()
        for decision in decisions:
            match decision:
                case Apply(updates):
                    applied = {update.worker for update in updates}
                    is_turn = not driver.gated and bool(driver.progress)  # with nobody there, nothing has to be spread
                case Grant(worker):
                    # A start; other Grants belong to the Apply before. Streamed, one may start late, after a push.
                    is_turn = worker not in applied and not driver.gated
                case Turn():
                    is_turn = driver.gated
                case _:
                    is_turn = False
            if is_turn:
                apart = driver.now - self.last
                require(apart >= gap * (1 - 1e-9) - 1e-9, f"two turns were {apart} s apart, and the gap is {gap} s")
                self.last = driver.now


class RingOrder(Promise):
    """The ring's order is fixed, and turns are taken in that order.

    The policy says what its ring is. The promise is that those who stay keep their order for ever, that the turn goes
    along that order and not otherwise, and that only they are passed over who have nothing to wait for, or are overdue.
    """

    def starts(self, driver: AnyDriver) -> None:
        self.ring: list[int] = []  # seats, from the one whose turn it is
        self.members: dict[int, set[int]] = {}
        self.pushing: deque[Task] = deque()  # in the order of their Turns

    def before(self, driver: AnyDriver) -> None:
        self.ring = [seat.number for seat in driver.policy.ring]  # type: ignore[attr-defined]
        self.members = {seat.number: set(seat.members) for seat in driver.policy.ring}  # type: ignore[attr-defined]
        self.seat_of = {worker: number for number, workers in self.members.items() for worker in workers}
        self.pace = driver.policy.pace.T  # type: ignore[attr-defined]
        self.granted_now: list[Task] = []
        self.turns: list[set[int]] = []  # who took them, in this answer

    def granted(self, driver: AnyDriver, task: Task) -> None:
        self.granted_now.append(task)

    def turned(self, driver: AnyDriver, task: Task) -> None:
        if driver.gated:
            task.notes["turned at"] = driver.now
            self.pushing.append(task)
            self.turns.append({task.worker})

    def cancelled(self, driver: AnyDriver, task: Task) -> None:
        """It lost its turn while it computed, or is overdue with its push."""
        policy: Any = driver.policy
        if not task.passed_over:
            overdue = driver.now - task.notes["turned at"]
            # What T was at that moment we cannot see, if this event has changed it; but it is no less than these.
            least = (1 + policy.patience) * min(self.pace, *policy.pace._mean.values())
            require(overdue >= least * (1 - 1e-9), f"worker {task.worker}'s push was cancelled after {overdue} s")
            task.passed_over = True

    def applied(self, driver: AnyDriver, tasks: list[Task]) -> None:
        members = [task for task in tasks if not task.departed]  # what the departed left goes with any turn
        if not driver.gated:
            self.turns.append({task.worker for task in members})
            return
        for task in members:
            while self.pushing and self.pushing[0] is not task:
                self.pushing.popleft().passed_over = True  # it died or hung in mid-push; it must not come after this
            require(bool(self.pushing), f"worker {task.worker}'s update overtook another's")
            self.pushing.popleft()

    def after(self, driver: AnyDriver, decisions: list[Decision]) -> None:
        ring = [seat.number for seat in driver.policy.ring]  # type: ignore[attr-defined]
        stay = set(ring) & set(self.ring)
        was, now = [seat for seat in self.ring if seat in stay], [seat for seat in ring if seat in stay]
        require(_rotated(was, now), f"the ring's order changed from {was} to {now}")
        require(len(set(ring) - stay) <= 1, "one event brought more than one seat")

        self._lose(driver)
        line = deque(self.ring)
        for workers in self.turns:
            seats = {self.seat_of[worker] for worker in workers}
            require(len(seats) <= 1, f"seats {seats} took one turn together")
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
        """Whoever has just lost its turn is overdue, and whatever it brings must be discarded."""
        policy: Any = driver.policy
        for worker in policy.lost:
            task = driver.running[worker]
            if not task.passed_over:
                overdue, least = driver.now - task.granted_at, (1 + policy.patience) * policy.pace.T
                require(
                    overdue >= least * (1 - 1e-9), f"worker {worker} lost its turn after {overdue} s, not {least} s"
                )
                task.passed_over = True

    def _pass_over(self, driver: AnyDriver, seat: int) -> None:
        """Nobody is waited for there."""
        for worker in self.members[seat]:
            waits = any(task.worker == worker and not task.departed for task in driver.unsettled.values())
            require(driver.gated or not waits, f"seat {seat} was passed over, and its update had arrived")
            task = driver.running.get(worker)
            if task is not None and task not in self.granted_now:
                require(task.passed_over, f"worker {worker} was overtaken")


def _rotated(a: list[int], b: list[int]) -> bool:
    return any(a[i:] + a[:i] == b for i in range(max(1, len(a))))


def promises_of(spec: str) -> tuple[Promise, ...]:
    """What is to be kept, besides what every policy promises."""
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
            return GapAtMost(int(given.get("staleness", 3))), AppliesAtOnce()
        case "dssp" if given.get("bounded") != "false":
            return GapAtMost(int(given.get("high", 15))), AppliesAtOnce()
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
    """As `TurnsApart`, for groups whose outer policy is R²SP: a turn is an Apply."""

    def __init__(self) -> None:
        super().__init__(lambda policy: policy.outer)  # type: ignore[attr-defined]

    def after(self, driver: AnyDriver, decisions: list[Decision]) -> None:
        super().after(driver, [decision for decision in decisions if isinstance(decision, Apply)])


class GroupOrder(Promise):
    """Groups refine the model in a fixed order, one at a time: nobody is passed over whose update waits."""

    def __init__(self, groups: int) -> None:
        self.groups = groups

    def before(self, driver: AnyDriver) -> None:
        outer = driver.policy.outer  # type: ignore[attr-defined]
        self.ring = [group for seat in outer.ring for group in seat.members]  # from the one whose turn it is
        self.waiting = set(outer.waiting)
        self.turns: list[int] = []

    def applied(self, driver: AnyDriver, tasks: list[Task]) -> None:
        groups = {task.worker % self.groups for task in tasks if not task.departed}
        require(len(groups) <= 1, f"groups {groups} refined the model together")
        self.turns += groups

    def after(self, driver: AnyDriver, decisions: list[Decision]) -> None:
        outer = driver.policy.outer  # type: ignore[attr-defined]
        ring = [group for seat in outer.ring for group in seat.members]
        stay = set(ring) & set(self.ring)
        was, now = [group for group in self.ring if group in stay], [group for group in ring if group in stay]
        require(_rotated(was, now), f"the order of groups changed from {was} to {now}")
        line = deque(self.ring)
        for group in self.turns:
            while line and line[0] != group:
                require(line[0] not in self.waiting, f"group {line[0]} was passed over, and its update waited")
                line.rotate(-1)
            line.rotate(-1)


class LateNeverCounts(Promise):
    """Whoever was granted in one round of its group never changes the model in another."""

    def __init__(self, groups: int) -> None:
        self.groups = groups

    def starts(self, driver: AnyDriver) -> None:
        self.rounds: dict[int, int] = dict.fromkeys(range(self.groups), 0)

    def granted(self, driver: AnyDriver, task: Task) -> None:
        task.notes["round"] = self.rounds[task.worker % self.groups]

    def applied(self, driver: AnyDriver, tasks: list[Task]) -> None:
        tasks = [task for task in tasks if not task.departed]  # what the departed left had come in time
        for task in tasks:
            now = self.rounds[task.worker % self.groups]
            require(
                task.notes["round"] == now, f"worker {task.worker}'s update of round {task.notes['round']} came late"
            )
        for group in {task.worker % self.groups for task in tasks}:
            self.rounds[group] += 1
