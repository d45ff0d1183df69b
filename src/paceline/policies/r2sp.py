"""R²SP, round-robin synchronous parallel (Chen et al., INFOCOM 2019; journal version with FL-R²SP, ToN 2026).

Workers update in a fixed round-robin order, evenly gapped, so that the servers' links are never stampeded. A turn is
one Apply and the Grant that follows it. The turn goes round the ring; nobody's update is applied out of turn, so an
update's staleness is at most N−1 under any timing. The paper's coordinator only delays permissions, which lets a fast
worker overtake; here the order holds always.

The paper's quantities: T is the iteration time (`pace.T`), N the number of seats in the ring, and two turns are
at least `relax`·T/N apart, a little less than T/N so that the ring can make up for jitter.

 - The start. T is unknown, so a pilot, the first to join, runs alone once. Then the others start one gap after
   the other, in the order in which they joined, which is the order of the ring.
 - A worker that leaves closes the ring. If it was its turn, the turn passes on at once. What had fully arrived from
   it goes with the next turn: a turn of its own would be one version more than there are members.
 - A worker overdue by more than `patience`·T loses its turn, but not its place, once anybody waits behind it: its
   late update is discarded, it is granted the newest model when the next gap allows, and it takes its turn when the
   ring comes round to it.
 - `groups=M`: M groups take turns instead of N workers, a barrier inside each, so staleness is M−1. `groups=auto`
   finds the fewest that are as fast (see `fewest.py`).
 - Streamed, a turn is a Turn and a Stream: it gates the push, whose slices are applied and returned as they come, in
   the order of the Turns. A push that is overdue would hold up all behind it, so it is cancelled. Each Stream is
   a version of its own, also that of one who has left; so N counts who was there since a worker's own Turn, when its
   model began to come back to it.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import deque
from typing import Annotated, Literal

from paceline.policies.components import AnnouncedUpdate, IterationTime, Weigher, Weights
from paceline.policies.contract import (
    Apply,
    Cancel,
    Decisions,
    Discard,
    Grant,
    Policy,
    Stream,
    Turn,
    Update,
    WakeAt,
    WorkerId,
    apply_one,
)
from paceline.policies.fewest_groups import MIN_GROUPS, FewestGroups
from paceline.policies.options import Range
from paceline.policies.ring import Ring, Seat
from paceline.policies.tuning import BatchTuner


class PushInOrder:
    """Streamed: a push under way, or the place in their order where a starter is granted."""

    __slots__ = ("over", "since", "starts", "update", "weight", "worker")

    def __init__(self, worker: WorkerId, since: float, weight: float = 1.0, starts: bool = False) -> None:
        self.worker, self.since, self.weight, self.starts = worker, since, weight, starts
        self.update: Update | None = None  # set when all of it is in
        self.over = False  # its worker has left in the midst of it


class R2SP(Policy):
    summary = "take turns in a fixed order, evenly gapped; staleness at most N−1"
    takes_turns = True

    def __init__(
        self,
        relax: Annotated[float, Range(0, open_low=True), "the gap between turns, in units of T/N"] = 0.8,
        patience: Annotated[float, Range(0, open_low=True), "how overdue one may be, in units of T"] = 4.0,
        groups: Annotated[
            int | Literal["all", "auto"], Range(1), "how many groups take turns; all: every worker by itself"
        ] = "all",
        tune_batches: Annotated[bool, "let faster workers compute larger batches"] = False,
        max_growth: Annotated[float, Range(1), "how many times its own a tuned batch may grow to"] = 4.0,
        weights: Weights = "sum",
    ) -> None:
        self.relax, self.patience = relax, patience
        self.search = FewestGroups() if groups == "auto" else None
        self.most_seats = {"all": math.inf, "auto": MIN_GROUPS}[groups] if isinstance(groups, str) else groups
        self.streamable = groups == "all"

        self.ring = Ring()
        self.seat_of: dict[WorkerId, Seat] = {}
        self.starters: dict[WorkerId, None] = {}  # members who wait for a first Grant, or for one after a lost turn
        self.waiting: set[WorkerId] = set()  # members who wait for their turn
        self.lost: set[WorkerId] = set()  # members still busy with an iteration whose turn has passed
        self.orphans: list[Update] = []  # updates of departed workers, for the next turn
        self.began: dict[WorkerId, float] = {}  # when an iteration began, put off by any wait for a Turn
        self.pace = IterationTime()
        self.starts_together = False  # may all begin at once, while T is unknown?
        self.numbers: list[WorkerId] | None = None  # those in the ring, where its order is by number
        self.first_turn: WorkerId | None = None  # where that order begins, until somebody has had a turn
        self.weigher = Weigher(weights, tuned=tune_batches)
        self.tuner = BatchTuner(max_growth) if tune_batches else None

        self.last = -math.inf  # when the last turn was taken, or the last starter granted
        self.turn_since = 0.0  # when the head's turn came
        self.turns = 0  # in this revolution
        self.wake = math.inf  # when the driver is to wake us

        self.pushes: deque[PushInOrder] = deque()  # streamed: who was given the Turn, in order
        self.push_of: dict[WorkerId, PushInOrder] = {}
        self.announced: dict[WorkerId, AnnouncedUpdate] = {}  # streamed: what those who wait for their Turn will push
        self.iteration: dict[WorkerId, int] = {}  # streamed: member → its Grants so far

    @property
    def gap(self) -> float:
        """The least time between two turns; 0 while T is unknown."""
        return self.relax * (self.pace.T or 0.0) / (len(self.ring) or 1)

    # What happens

    @property
    def hears_ready(self) -> bool:
        return self.streamed

    @property
    def least_workers(self) -> int:
        return int(self.most_seats) if self.search is None and self.most_seats < math.inf else 1

    def joined(self, worker: WorkerId, now: float) -> Decisions:
        seat = self._seat(worker) if len(self.ring) < self.most_seats else self.ring.smallest()
        self.ring.sit(worker, seat)
        self.seat_of[worker] = seat
        self.starters[worker] = None
        if self.search:
            self.search.restart()
        return self._go(now)

    def ready(self, worker: WorkerId, batch_size: int, now: float) -> Decisions:
        if not self.streamed:
            return [Turn(worker)]
        if worker not in self.seat_of:
            return []
        self.weigher.see(worker, batch_size)
        if worker in self.lost:  # what it computed is too old to be pushed
            self.lost.discard(worker)
            return [self._cancel(worker, now), *self._go(now)]
        self.announced[worker] = AnnouncedUpdate(worker, batch_size)
        self._await_turn(worker, now)
        return self._go(now)

    def arrived(self, update: Update, now: float) -> Decisions:
        worker = update.worker
        if worker not in self.seat_of or (self.streamed and not self._is_awaited(update)):
            return [Discard(update)]
        busy = now - self.began[worker]
        self._observe(worker, busy)
        if not self.streamed:
            self.weigher.see(worker, update.batch_size)
        if self.tuner:
            self.tuner.observe(update, busy)
        if self.streamed:
            self.push_of[worker].update = update
            return self._go(now)
        if worker in self.lost:
            self.lost.discard(worker)
            self.starters[worker] = None
            return [Discard(update), *self._go(now)]
        self._await_turn(worker, now)
        self.seat_of[worker].pending.append(update)
        return self._go(now)

    def left(self, worker: WorkerId, now: float) -> Decisions:
        seat = self.seat_of.pop(worker, None)
        if seat is None:
            return []
        if self.numbers:
            self.numbers.remove(worker)
        self.ring.rise(worker, seat)
        for place in (seat.running, seat.present, self.starters, self.began, self.announced, self.iteration):
            place.pop(worker, None)
        push = self.push_of.pop(worker, None)
        if push is not None:
            push.over = True
        self.lost.discard(worker)
        self.waiting.discard(worker)
        self.pace.forget(worker)
        self.weigher.forget(worker)
        if self.tuner:
            self.tuner.forget(worker)
        if self.search:
            self.search.restart()
        if not seat.members:
            self._close_ring(seat, now)
        return self._go(now)

    def woke(self, now: float) -> Decisions:
        self.wake = math.inf
        return self._go(now)

    # Turns

    def _await_turn(self, worker: WorkerId, now: float) -> None:
        seat = self.seat_of[worker]
        del seat.running[worker]
        seat.present[worker] = now
        self.waiting.add(worker)

    def _go(self, now: float) -> Decisions:
        """Let everyone go whose time has come, and ask to be woken for the next."""
        decisions: Decisions = []
        while True:
            wake = math.inf
            if self.pushes:
                wake = self._finish_pushes(decisions, now)
            next_gap = self.last + self.gap
            if self.starters and self._may_start():
                if now >= next_gap:
                    self._start(decisions, now)
                    continue
                wake = min(wake, next_gap)
            seat = self._whose_turn(now)
            if seat is None:
                break
            if not seat.running:  # all are in
                if now >= next_gap:
                    self._take_turn(seat, decisions, now)
                    continue
                wake = min(wake, next_gap)
            elif (deadline := self._deadline(seat.since)) is not None:
                if now < deadline:
                    wake = min(wake, deadline)
                elif self.waiting and not self.push_of.keys() & seat.running:  # a push has a deadline of its own
                    self.lost.update(seat.running)
                    seat.running.clear()
                    continue
            break
        if self.orphans and not self.seat_of:  # no turn will come
            decisions.append(self._apply([]))
        if wake < self.wake:
            self.wake = wake
            decisions.append(WakeAt(wake))
        return decisions

    def _whose_turn(self, now: float) -> Seat | None:
        """The first seat in line that has anything to wait for or to apply."""
        passed = 0
        while True:
            head = self.ring.head
            if head.running or head.present or head.pending:
                return head
            if passed >= len(self.ring):
                return None
            self._pass_on(now)
            passed += 1

    def _take_turn(self, seat: Seat, decisions: Decisions, now: float) -> None:
        self.last = now
        self.first_turn = None
        self.waiting.difference_update(seat.present)
        if self.streamed:
            for worker, since in seat.present.items():
                weights = self.weigher.in_round((self.announced.pop(worker),), len(self.seat_of))
                decisions += [Turn(worker), Stream((worker,), weights, expected_staleness=len(self.ring) - 1)]
                self.began[worker] += now - since
                self.push_of[worker] = push = PushInOrder(worker, now, weights[0])
                self.pushes.append(push)
                seat.running[worker] = None
            seat.present.clear()
        else:
            if self.search:
                self.search.turn(max(update.compute_seconds for update in seat.pending))
            going, updates = seat.present, seat.pending
            seat.present, seat.pending = {}, []
            decisions.append(self._apply(updates))
            decisions.extend(self._grant(worker, seat, now) for worker in going)
        self._pass_on(now)

    def _pass_on(self, now: float) -> None:
        self.ring.pass_on()
        self.turn_since = now
        self.turns += 1
        if self.turns >= len(self.ring):
            self.turns = 0
            if self.search and not self.starters:
                self.search.revolution(len(self.seat_of), now)
                if self.search.groups != self.most_seats:
                    self._seat_anew(self.search.groups)

    def _deadline(self, since: float) -> float | None:
        """When one who was granted at `since` is overdue; None while T is unknown, or nothing takes any time."""
        if not (T := self.pace.T):
            return None
        return max(self.turn_since, since + T) + self.patience * T

    def _finish_pushes(self, decisions: Decisions, now: float) -> float:
        """Streamed: apply what has arrived, in the order of the Turns. Returns when the first is overdue.

        What is overdue holds up the shards, which apply in that order too; so it is cancelled.
        """
        while self.pushes:
            push = self.pushes[0]
            worker, update = push.worker, push.update
            if update:  # also of one who has left since: the shards have it in this place
                decisions.append(apply_one(update, push.weight))
            if not (update or push.starts or push.over):
                T = self.pace.T
                deadline = push.since + (1 + self.patience) * T if T else math.inf
                if now < deadline:
                    return deadline
                if len(self.pushes) == 1 and not self.waiting:
                    break
                del self.push_of[worker], self.seat_of[worker].running[worker]
                decisions.append(self._cancel(worker, now))
            elif not push.over:
                del self.push_of[worker]
                decisions.append(self._grant(worker, self.seat_of[worker], now))
            self.pushes.popleft()
        return math.inf

    def _cancel(self, worker: WorkerId, now: float) -> Cancel:
        """Streamed: it has lost its turn, and starts again when the next gap allows."""
        self._observe(worker, now - self.began[worker])
        self.starters[worker] = None
        return Cancel(worker)

    def _is_awaited(self, update: Update) -> bool:
        """Streamed: is this what was given the Turn? Else it was cancelled, and its worker goes on by itself."""
        push = self.push_of.get(update.worker)
        return push is not None and not push.starts and update.iteration == self.iteration[update.worker]

    # Starting

    def _may_start(self) -> bool:
        """One by one once T is known; before that only a pilot, alone, or all at once."""
        return self.starts_together or self.pace.T is not None or not self.began

    def _start(self, decisions: Decisions, now: float) -> None:
        worker = next(iter(self.starters))
        if (first := self.first_turn) is not None:
            worker = min(self.starters, key=lambda one: (one < first, one))
        del self.starters[worker]
        self.last = now
        seat = self.seat_of[worker]
        if self.streamed:  # after the pushes under way: whose they are have another turn before its first
            seat.running[worker] = None
            self.push_of[worker] = push = PushInOrder(worker, now, starts=True)
            self.pushes.append(push)
        else:
            decisions.append(self._grant(worker, seat, now))

    def _grant(self, worker: WorkerId, seat: Seat, now: float) -> Grant:
        seat.running[worker] = None
        seat.since = self.began[worker] = now
        if self.streamed:
            self.iteration[worker] = self.iteration.get(worker, 0) + 1
        batch = self.tuner.batch(worker) if self.tuner else None
        return Grant(worker, batch, len(self.ring) - 1)

    def _apply(self, updates: list[Update]) -> Apply:
        if self.orphans:
            updates, self.orphans = self.orphans + updates, []
        return Apply(tuple(updates), self.weigher.in_round(updates, len(self.seat_of)))

    def _observe(self, worker: WorkerId, seconds: float) -> None:
        """One who hung for long must not slow the ring for long, but one who has become slow must be allowed to be."""
        T = self.pace.T
        self.pace.observe(worker, min(seconds, (1 + self.patience) * T) if T else seconds)

    # Seats

    def _seat(self, worker: WorkerId) -> Seat:
        """A new one."""
        if self.numbers is None:
            return self.ring.add()
        at = bisect(self.numbers, worker)
        after = self.seat_of[self.numbers[at % len(self.numbers)]] if self.numbers else None
        self.numbers.insert(at, worker)
        return self.ring.add(before=after)

    def _close_ring(self, seat: Seat, now: float) -> None:
        """Take away a seat where nobody sits any more."""
        self.orphans += seat.pending
        if seat is self.ring.head:
            self.turn_since = now
        self.ring.remove(seat)

    def _seat_anew(self, groups: int) -> None:
        """Seat everyone in `groups` neighbouring blocks, in the order of the ring from the one whose turn it is."""
        self.most_seats = groups
        old = list(self.ring)
        members = [(worker, seat) for seat in old for worker in seat.members]
        self.ring = Ring()
        seats = [self.ring.add() for _ in range(min(groups, len(members)))]
        for i, (worker, was) in enumerate(members):
            seat = self.seat_of[worker] = seats[i * len(seats) // len(members)]
            self.ring.sit(worker, seat)
            if worker in was.running:
                seat.running[worker] = None
                seat.since = max(seat.since, was.since)
            if worker in was.present:
                seat.present[worker] = was.present[worker]
        for was in old:
            for update in was.pending:
                stays = update.worker in was.members
                (self.seat_of[update.worker].pending if stays else self.orphans).append(update)
