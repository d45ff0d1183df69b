"""R²SP if the driver streams updates: a turn gates the push, not the Apply.

When all members of a seat have computed their gradients, the seat waits for its turn. The turn is a Turn for each
member and one Stream. The shards then apply each slice when all members have sent it, in the order of the Streams, and
return it. The Apply and the next Grants follow when the whole pushes have arrived and every earlier turn is finished.

 - A late push holds up every push behind it on the shards. It is cancelled when it is overdue: (1 + `patience`)·T after
   its Turn. The other pushes of its turn are not cancelled if the driver says that the servers hold them. A worker that
   lost its turn while it computed is cancelled when its gradient is ready.
 - A worker that starts takes a place in the order of the pushes. If it were granted at once, the workers that push now
   could take another turn before its first one.
 - Each Stream makes a version of its own, even if its workers leave before the Apply. In the bound N−1 on staleness, N
   therefore counts every member since a worker's own Turn, when its next model began to come back.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from paceline.policies.components import AnnouncedUpdate
from paceline.policies.contract import Apply, Cancel, Decisions, Discard, Grant, Stream, Turn, Update, WorkerId
from paceline.policies.ring import Seat

if TYPE_CHECKING:
    from paceline.policies.r2sp import R2SP


class PushInOrder:
    """The pushes of one turn, or the place in the order of the pushes where a starter is granted."""

    __slots__ = ("held", "since", "starts", "updates", "weights")

    def __init__(self, weights: dict[WorkerId, float], since: float, starts: bool = False) -> None:
        self.weights, self.since, self.starts = weights, since, starts
        self.held: set[WorkerId] = set()  # workers whose whole push waits at the servers for the others
        self.updates: dict[WorkerId, Update] = {}  # those that have arrived whole, even if their workers have left


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
        policy, members = self.policy, tuple(seat.present)
        weights = policy.weigher.in_round([self.announced.pop(worker) for worker in members], len(policy.seat_of))
        for worker, since in seat.present.items():
            decisions.append(Turn(worker))
            policy.began[worker] += now - since  # the wait for the turn is no part of the iteration
        decisions.append(Stream(members, weights, expected_staleness=len(policy.ring) - 1))
        self._append(PushInOrder(dict(zip(members, weights, strict=True)), now), seat)
        seat.present.clear()

    def start(self, worker: WorkerId, now: float) -> None:
        """Grant a starter when every push before it is finished."""
        self._append(PushInOrder({worker: 1.0}, now, starts=True), self.policy.seat_of[worker])

    def is_pushing(self, seat: Seat) -> bool:
        """Return whether a member of the seat pushes. A push has a deadline of its own."""
        return bool(self.push_of.keys() & seat.running)

    def arrived(self, update: Update, now: float) -> Decisions:
        worker = update.worker
        push = self.push_of.get(worker)
        if push is None or push.starts or update.iteration != self.iteration[worker]:
            return [Discard(update)]  # its push was cancelled
        self.policy.profile(update, now)
        push.updates[worker] = update
        return self.policy.proceed(now)

    def held(self, worker: WorkerId, now: float) -> Decisions:
        push = self.push_of.get(worker)
        if push is None or push.starts:
            return []
        push.held.add(worker)
        return self.policy.proceed(now)

    def left(self, worker: WorkerId) -> None:
        self.announced.pop(worker, None)
        self.iteration.pop(worker, None)
        self.push_of.pop(worker, None)

    def finish_pushes(self, decisions: Decisions, now: float) -> float:
        """Apply pushes that have arrived, in the order of the Turns. Cancel overdue ones.

        Return the deadline of the first push that is not finished.
        """
        while self.pushes:
            push = self.pushes[0]
            members = [worker for worker in push.weights if self.push_of.get(worker) is push]
            missing = [] if push.starts else [worker for worker in members if worker not in push.updates]
            late = [worker for worker in missing if worker not in push.held]
            if late:
                T = self.policy.pace.T
                deadline = push.since + (1 + self.policy.patience) * T if T else math.inf
                if now < deadline:
                    return deadline
                if len(self.pushes) == 1 and not (self.policy.waiting or push.updates or push.held):
                    break  # no other worker waits for it
                for worker in late:
                    del self.push_of[worker], self.policy.seat_of[worker].running[worker]
                    decisions.append(self._cancel(worker, now))
            if len(missing) > len(late):
                break  # the servers apply the held ones now
            if push.updates:
                updates = tuple(push.updates[worker] for worker in push.weights if worker in push.updates)
                decisions.append(Apply(updates, tuple(push.weights[update.worker] for update in updates)))
            for worker in members:
                if worker not in late:
                    del self.push_of[worker]
                    decisions.append(self._grant(worker, now))
            self.pushes.popleft()
        return math.inf

    def _append(self, push: PushInOrder, seat: Seat) -> None:
        for worker in push.weights:
            seat.running[worker] = None
            self.push_of[worker] = push
        self.pushes.append(push)

    def _grant(self, worker: WorkerId, now: float) -> Grant:
        self.iteration[worker] = self.iteration.get(worker, 0) + 1
        return self.policy.grant(worker, self.policy.seat_of[worker], now)

    def _cancel(self, worker: WorkerId, now: float) -> Cancel:
        """Cancel the iteration of a worker that lost its turn. It starts again at the next gap."""
        self.policy.observe_time(worker, now - self.policy.began[worker])
        self.policy.starters[worker] = None
        return Cancel(worker)
