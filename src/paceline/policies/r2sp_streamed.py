"""R²SP if the driver streams updates: a turn gates the push, not the Apply.

When a worker has computed its gradient, it waits for its turn. The turn is a Turn and a Stream. The shards then apply
and return each slice of the push as it arrives, in the order of the Turns. The Apply and the next Grant follow when the
whole push has arrived and every earlier push is finished.

 - A late push holds up every push behind it on the shards. It is cancelled when it is overdue: (1 + `patience`)·T after
   its Turn. A worker that lost its turn while it computed is cancelled when its gradient is ready.
 - A worker that starts takes a place in the order of the pushes. If it were granted at once, the workers that push now
   could take another turn before its first one.
 - Each Stream makes a version of its own, even if its worker leaves before the Apply. In the bound N−1 on staleness, N
   therefore counts every member since a worker's own Turn, when its next model began to come back.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from paceline.policies.components import AnnouncedUpdate
from paceline.policies.contract import Cancel, Decisions, Discard, Grant, Stream, Turn, Update, WorkerId, apply_one
from paceline.policies.ring import Seat

if TYPE_CHECKING:
    from paceline.policies.r2sp import R2SP


class PushInOrder:
    """A push that has begun, or the place in the order of the pushes where a starter is granted."""

    __slots__ = ("abandoned", "since", "starts", "update", "weight", "worker")

    def __init__(self, worker: WorkerId, since: float, weight: float = 1.0, starts: bool = False) -> None:
        self.worker, self.since, self.weight, self.starts = worker, since, weight, starts
        self.update: Update | None = None  # set when the whole push has arrived
        self.abandoned = False  # whether its worker has left


class StreamedTurns:
    """The turns of a streamed R²SP: the pushes in the order of their Turns."""

    def __init__(self, policy: R2SP) -> None:
        self.policy = policy
        self.pushes: deque[PushInOrder] = deque()  # unfinished pushes, in the order of their Turns
        self.push_of: dict[WorkerId, PushInOrder] = {}
        self.announced: dict[WorkerId, AnnouncedUpdate] = {}  # the updates of members that wait for their Turn
        self.iteration: dict[WorkerId, int] = {}  # member → number of its Grants

    def ready(self, worker: WorkerId, batch_size: int, now: float) -> Decisions:
        policy = self.policy
        if worker not in policy.seat_of:
            return []
        policy.weigher.see(worker, batch_size)
        if worker in policy.lost:  # the gradient is too old to be pushed
            policy.lost.discard(worker)
            return [self._cancel(worker, now), *policy.proceed(now)]
        self.announced[worker] = AnnouncedUpdate(worker, batch_size)
        policy.await_turn(worker, now)
        return policy.proceed(now)

    def take_turn(self, seat: Seat, decisions: Decisions, now: float) -> None:
        """Let the members of a seat push."""
        policy = self.policy
        for worker, since in seat.present.items():
            weights = policy.weigher.in_round((self.announced.pop(worker),), len(policy.seat_of))
            decisions += [Turn(worker), Stream((worker,), weights, expected_staleness=len(policy.ring) - 1)]
            policy.began[worker] += now - since  # the wait for the turn is no part of the iteration
            self._append(PushInOrder(worker, now, weights[0]), seat)
        seat.present.clear()

    def start(self, worker: WorkerId, now: float) -> None:
        """Grant a starter when every push before it is finished."""
        self._append(PushInOrder(worker, now, starts=True), self.policy.seat_of[worker])

    def is_pushing(self, seat: Seat) -> bool:
        """Return whether a member of the seat pushes. A push has a deadline of its own."""
        return bool(self.push_of.keys() & seat.running)

    def arrived(self, update: Update, now: float) -> Decisions:
        worker = update.worker
        push = self.push_of.get(worker)
        if push is None or push.starts or update.iteration != self.iteration[worker]:
            return [Discard(update)]  # its push was cancelled
        self.policy.profile(update, now)
        push.update = update
        return self.policy.proceed(now)

    def left(self, worker: WorkerId) -> None:
        self.announced.pop(worker, None)
        self.iteration.pop(worker, None)
        push = self.push_of.pop(worker, None)
        if push is not None:
            push.abandoned = True

    def finish_pushes(self, decisions: Decisions, now: float) -> float:
        """Apply pushes that have arrived, in the order of the Turns. Cancel overdue ones.

        Return the deadline of the first push that is not finished.
        """
        policy = self.policy
        while self.pushes:
            push = self.pushes[0]
            worker, update = push.worker, push.update
            if update:  # even if its worker has left: the shards have applied it at this place
                decisions.append(apply_one(update, push.weight))
            if not (update or push.starts or push.abandoned):
                T = policy.pace.T
                deadline = push.since + (1 + policy.patience) * T if T else math.inf
                if now < deadline:
                    return deadline
                if len(self.pushes) == 1 and not policy.waiting:  # no other worker waits for it
                    break
                del self.push_of[worker], policy.seat_of[worker].running[worker]
                decisions.append(self._cancel(worker, now))
            elif not push.abandoned:
                del self.push_of[worker]
                decisions.append(self._grant(worker, now))
            self.pushes.popleft()
        return math.inf

    def _append(self, push: PushInOrder, seat: Seat) -> None:
        seat.running[push.worker] = None
        self.push_of[push.worker] = push
        self.pushes.append(push)

    def _grant(self, worker: WorkerId, now: float) -> Grant:
        self.iteration[worker] = self.iteration.get(worker, 0) + 1
        return self.policy.grant(worker, self.policy.seat_of[worker], now)

    def _cancel(self, worker: WorkerId, now: float) -> Cancel:
        """Cancel the iteration of a worker that lost its turn. It starts again at the next gap."""
        self.policy.observe_time(worker, now - self.policy.began[worker])
        self.policy.starters[worker] = None
        return Cancel(worker)
