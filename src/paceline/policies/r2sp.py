"""R²SP, Round-Robin Synchronous Parallel (Chen et al., INFOCOM 2019; journal version with FL-R²SP, ToN 2026).

Workers update the model in a fixed round-robin order (section III-C), evenly gapped (section III-B). The gaps keep
workers from competing for the servers' links. The order bounds the staleness of every update by N−1.

The paper's quantities:

    T       time of an iteration, of the slowest worker    `pace.T`
    N       number of workers that take turns              `len(ring)`
    r       relaxation factor, 0.8 in the paper            `relax`
    rT/N    least time between two turns                   `gap`

The paper's coordinator (section V, algorithm 1) answers Request-to-Proceed with Permission-to-Proceed. Here `arrived`
is the request and a Grant is the permission. A turn is one Apply and the Grant that follows it. The paper's coordinator
only delays permissions, so the update of a fast worker can overtake another. Here updates are also applied in the order
of the ring, so that the staleness is at most N−1 under any timing.

The paper leaves these cases open:

 - At the start T is unknown. The first worker to join is the pilot: it runs one iteration alone. Then the others start,
   one gap apart. The ring keeps the order in which the workers joined.
 - A worker that leaves is taken out of the ring. If it had the turn, the turn passes on at once. An update that had
   fully arrived from it is applied with the next turn. A turn of its own would make one version more than there are
   members.
 - A worker that is overdue by more than `patience`·T loses its turn once another worker waits behind it. It keeps its
   place in the ring. Its late update is discarded, and it is granted the newest model at the next gap.
 - `groups=M`: M groups take turns instead of N workers, with a barrier inside each group. Staleness is at most M−1.
   `groups=auto` finds the fewest groups that are as fast (see `fewest_groups.py`).
 - If the driver streams updates, a turn gates the push instead (see `r2sp_streamed.py`).
"""

from __future__ import annotations

import math
from bisect import bisect
from typing import Annotated, Literal

from paceline.policies.components import IterationTime, Weigher, Weights
from paceline.policies.contract import Apply, Decisions, Discard, Grant, Policy, Turn, Update, WakeAt, WorkerId
from paceline.policies.fewest_groups import MIN_GROUPS, FewestGroups
from paceline.policies.options import Range
from paceline.policies.r2sp_streamed import StreamedTurns
from paceline.policies.ring import Ring, Seat
from paceline.policies.tuning import BatchTuner


class R2SP(Policy):
    summary = "workers take turns in a fixed order, evenly gapped; staleness is at most N−1"
    takes_turns = True

    def __init__(
        self,
        relax: Annotated[float, Range(0, 2, open_low=True), "the gap between two turns, in units of T/N"] = 0.8,
        patience: Annotated[float, Range(0, open_low=True), "how long a worker may be overdue, in units of T"] = 4.0,
        groups: Annotated[
            int | Literal["all", "auto"], Range(1), "the number of groups that take turns; all: each worker by itself"
        ] = "all",
        tune_batches: Annotated[bool, "give faster workers larger batches"] = False,
        max_growth: Annotated[float, Range(1), "the largest tuned batch, in units of the worker's own batch"] = 4.0,
        weights: Weights = "sum",
    ) -> None:
        self.relax, self.patience = relax, patience
        self.search = FewestGroups() if groups == "auto" else None
        self.most_seats = {"all": math.inf, "auto": MIN_GROUPS}[groups] if isinstance(groups, str) else groups
        self.asked_groups = groups if isinstance(groups, int) else None
        self.hears_held = groups != "all"
        self.streamable = groups != "auto"  # the search for the fewest groups measures whole transfers

        self.ring = Ring()
        self.seat_of: dict[WorkerId, Seat] = {}
        self.starters: dict[WorkerId, None] = {}  # members that wait for a first Grant, or for one after a lost turn
        self.waiting: set[WorkerId] = set()  # members that wait for their turn
        self.lost: set[WorkerId] = set()  # members that still run an iteration whose turn has passed
        self.orphans: list[Update] = []  # updates of departed workers, applied with the next turn

        self.pace = IterationTime()
        self.began: dict[WorkerId, float] = {}  # start of each member's iteration; a wait for a Turn moves it on
        self.last_turn = -math.inf  # time of the last turn or start
        self.turn_since = 0.0  # when the turn came to the head of the ring
        self.turns = 0  # turns in this revolution of the ring
        self.wake = math.inf  # time of the WakeAt that is set

        self.weigher = Weigher(weights, tuned=tune_batches)
        self.tuner = BatchTuner(max_growth) if tune_batches else None
        self.streaming = StreamedTurns(self)

        # FL-R²SP sets these three:
        self.starts_together = False  # whether all members start at once while T is unknown
        self.sorted_ids: list[WorkerId] | None = None  # members, if the ring is ordered by id; None: by joining
        self.first_turn: WorkerId | None = None  # the member to start first; None after the first turn

    @property
    def least_workers(self) -> int:
        return int(self.most_seats) if self.search is None and self.most_seats < math.inf else 1

    @property
    def hears_ready(self) -> bool:
        return self.streamed

    # Section III-B: the gap between updates

    @property
    def gap(self) -> float:
        """The least time between two turns, rT/N; 0 while T is unknown."""
        return self.relax * (self.pace.T or 0.0) / (len(self.ring) or 1)

    # Events

    def joined(self, worker: WorkerId, now: float) -> Decisions:
        seat = self._add_seat(worker) if len(self.ring) < self.most_seats else self.ring.smallest()
        self.ring.sit(worker, seat)
        self.seat_of[worker] = seat
        self.starters[worker] = None
        if self.search:
            self.search.restart()
        return self.proceed(now)

    def ready(self, worker: WorkerId, batch_size: int, now: float) -> Decisions:
        if self.streamed:
            return self.streaming.ready(worker, batch_size, now)
        return [Turn(worker)]

    def arrived(self, update: Update, now: float) -> Decisions:
        worker = update.worker
        if worker not in self.seat_of:
            return [Discard(update)]
        if self.streamed:
            return self.streaming.arrived(update, now)
        self.weigher.see(worker, update.batch_size)
        self.profile(update, now)
        if worker in self.lost:
            self.lost.discard(worker)
            self.starters[worker] = None
            return [Discard(update), *self.proceed(now)]
        self.await_turn(worker, now)
        self.seat_of[worker].pending.append(update)
        return self.proceed(now)

    def streams_together(self, workers: int) -> bool:
        return self.most_seats < workers

    def measured(self, kind: str, subject: object, value: float, now: float) -> Decisions:
        if kind == "own_batch" and isinstance(subject, WorkerId):
            self.weigher.set_own(subject, int(value))
            if self.tuner:
                self.tuner.set_own(subject, int(value))
        if kind == "held" and self.streamed and isinstance(subject, WorkerId):
            return self.streaming.held(subject, now)
        return []

    def left(self, worker: WorkerId, now: float) -> Decisions:
        seat = self.seat_of.pop(worker, None)
        if seat is None:
            return []
        if self.streamed:
            self.streaming.left(worker)
        if self.sorted_ids:
            self.sorted_ids.remove(worker)
        self.ring.rise(worker, seat)
        for place in (seat.running, seat.present, self.starters, self.began):
            place.pop(worker, None)
        self.lost.discard(worker)
        self.waiting.discard(worker)
        self.pace.forget(worker)
        self.weigher.forget(worker)
        if self.tuner:
            self.tuner.forget(worker)
        if self.search:
            self.search.restart()
        if not seat.members:
            self._remove_seat(seat, now)
        return self.proceed(now)

    def woke(self, now: float) -> Decisions:
        self.wake = math.inf
        return self.proceed(now)

    # Section III-C: the order of updates

    def await_turn(self, worker: WorkerId, now: float) -> None:
        """Let a worker wait for its turn: its iteration is complete or, streamed, its gradient is computed."""
        seat = self.seat_of[worker]
        del seat.running[worker]
        seat.present[worker] = now
        self.waiting.add(worker)

    def proceed(self, now: float) -> Decisions:
        """Give every turn and start every worker that is due. Set a WakeAt for the next one."""
        decisions: Decisions = []
        pushes = self.streaming.pushes  # empty unless the driver streams
        while True:
            wake = self.streaming.finish_pushes(decisions, now) if pushes else math.inf
            next_turn = self.last_turn + self.gap
            if self.starters and self._may_start():
                if now >= next_turn:
                    self._start(decisions, now)
                    continue
                wake = min(wake, next_turn)
            seat = self._whose_turn(now)
            if seat is None:
                break
            if not seat.running:  # every member of the seat waits for the turn
                if now >= next_turn:
                    self._take_turn(seat, decisions, now)
                    continue
                wake = min(wake, next_turn)
            elif (deadline := self._deadline(seat.since)) is not None:
                if now < deadline:
                    wake = min(wake, deadline)
                elif self.waiting and not self.streaming.is_pushing(seat):
                    self.lost.update(seat.running)
                    seat.running.clear()
                    continue
            break
        if self.orphans and not self.seat_of:  # the last member has left, so no turn will come
            decisions.append(self._apply([]))
        if wake < self.wake:
            self.wake = wake
            decisions.append(WakeAt(wake))
        return decisions

    def _whose_turn(self, now: float) -> Seat | None:
        """Return the first seat in line that runs an iteration or waits for its turn. Skip the others."""
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
        """Apply the seat's updates and grant its members; streamed, let them push."""
        self.last_turn = now
        self.first_turn = None
        self.waiting.difference_update(seat.present)
        if self.streamed:
            self.streaming.take_turn(seat, decisions, now)
        else:
            if self.search:
                self.search.turn(max(update.compute_seconds for update in seat.pending))
            members, updates = seat.present, seat.pending
            seat.present, seat.pending = {}, []
            decisions.append(self._apply(updates))
            decisions.extend(self.grant(worker, seat, now) for worker in members)
        self._pass_on(now)

    def _pass_on(self, now: float) -> None:
        """Pass the turn to the next seat. After a full revolution the number of groups may change."""
        self.ring.pass_on()
        self.turn_since = now
        self.turns += 1
        if self.turns >= len(self.ring):
            self.turns = 0
            if self.search and not self.starters:
                self.search.revolution(len(self.seat_of), now)
                if self.search.groups != self.most_seats:
                    self._reassign_seats(self.search.groups)

    def _deadline(self, since: float) -> float | None:
        """Return when a seat granted at `since` is overdue. None means never: T is unknown or 0."""
        if not (T := self.pace.T):
            return None
        return max(self.turn_since, since + T) + self.patience * T

    def _apply(self, updates: list[Update]) -> Apply:
        if self.orphans:
            updates, self.orphans = self.orphans + updates, []
        return Apply(tuple(updates), self.weigher.in_round(updates, len(self.seat_of)))

    # Section V: Permission-to-Proceed, with the tuned batch size of section IV

    def grant(self, worker: WorkerId, seat: Seat, now: float) -> Grant:
        seat.running[worker] = None
        seat.since = self.began[worker] = now
        batch = self.tuner.batch(worker) if self.tuner else None
        return Grant(worker, batch, len(self.ring) - 1)

    def _may_start(self) -> bool:
        """Return whether a starter may be granted. While T is unknown, only the pilot may, alone, or all at once."""
        return self.starts_together or self.pace.T is not None or not self.began

    def _start(self, decisions: Decisions, now: float) -> None:
        worker = next(iter(self.starters))
        if (first := self.first_turn) is not None:
            worker = min(self.starters, key=lambda starter: (starter < first, starter))
        del self.starters[worker]
        self.last_turn = now
        if self.streamed:
            self.streaming.start(worker, now)
        else:
            decisions.append(self.grant(worker, self.seat_of[worker], now))

    # Section V: profiling the iteration time T

    def profile(self, update: Update, now: float) -> None:
        """Measure the iteration of an update that has arrived."""
        busy = now - self.began[update.worker]
        self.observe_time(update.worker, busy)
        if self.tuner:
            self.tuner.observe(update, busy)

    def observe_time(self, worker: WorkerId, seconds: float) -> None:
        """Update T. The cap keeps one long hang from slowing the ring; a worker that stays slow still raises T."""
        T = self.pace.T
        self.pace.observe(worker, min(seconds, (1 + self.patience) * T) if T else seconds)

    # Seats

    def _add_seat(self, worker: WorkerId) -> Seat:
        """Return a new seat for a worker: last in line, or at its place if the ring is ordered by id."""
        if self.sorted_ids is None:
            return self.ring.add()
        at = bisect(self.sorted_ids, worker)
        after = self.seat_of[self.sorted_ids[at % len(self.sorted_ids)]] if self.sorted_ids else None
        self.sorted_ids.insert(at, worker)
        return self.ring.add(before=after)

    def _remove_seat(self, seat: Seat, now: float) -> None:
        """Take an empty seat out of the ring. Its updates are applied with the next turn."""
        self.orphans += seat.pending
        if seat is self.ring.head:
            self.turn_since = now
        self.ring.remove(seat)

    def _reassign_seats(self, groups: int) -> None:
        """Seat all members in `groups` blocks of neighbours, in the order of the ring from its head."""
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
