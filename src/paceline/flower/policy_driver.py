"""The members of a federation and the policy that drives them, as a pure state machine.

A member is sent a model (an Order) for each Grant, and replies with an update. The federation reads no clock, sends no
message and knows no array. Its driver sends the Orders that the methods return, and passes on what it hears.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.job.accounting import Ledger, Watcher
from paceline.policies import Apply, Cancel, Decision, Discard, Grant, Keep, Policy, Turn, Update, WakeAt


class Model(Protocol):
    """The global model. It holds the replies that the policy has not decided on."""

    def apply(self, apply: Apply, compare: bool) -> Sequence[float]:
        """Make the next version from these updates. Return the cosine of each with all, if `compare`."""

    def keep(self, update: Update, slot: int) -> None:
        """Put a reply aside in a slot, in the place of the slot's old one."""

    def drop(self, update: Update) -> None:
        """Drop a reply."""


@dataclass(frozen=True)
class Order:
    """The order to send a member the newest model, to train from."""

    worker: int
    incarnation: int
    iteration: int
    version: int


@dataclass
class _Member:
    incarnation: int
    iteration: int = 0  # the number of Grants since it joined
    is_awaited: bool = False  # whether it owes a reply to its last Order
    waiting: Update | None = None  # its reply, which waits for a Turn


class PolicyDriver:
    """Passes what happens to the policy, and carries out its decisions."""

    def __init__(self, policy: Policy, model: Model, watcher: Watcher) -> None:
        self.policy, self.model = policy, model
        self.ledger = Ledger(policy, watcher)
        self.wake_time: float | None = None  # when `wake` is to be called, if ever
        self.progress = 0.0  # the updates that were decided, for each member that takes part
        self._members: dict[int, _Member] = {}
        self._incarnations: dict[int, int] = {}  # worker → its last incarnation
        self._kept: dict[int, Update] = {}  # slot → the update in it

    @property
    def version(self) -> int:
        """The version of the model: the number of Applies so far."""
        return self.ledger.version

    def __contains__(self, worker: int) -> bool:
        return worker in self._members

    @property
    def participants(self) -> int:
        """The number of members that the policy does not leave out."""
        return sum(not self.policy.exclusion(worker) for worker in self._members)

    def join(self, worker: int, now: float) -> list[Order]:
        """Take in a member."""
        incarnation = self._incarnations[worker] = self._incarnations.get(worker, 0) + 1
        self._members[worker] = _Member(incarnation)
        return self._carry_out(self.ledger.joined(worker, now, incarnation), now)

    def leave(self, worker: int, now: float, lost: bool = False) -> list[Order]:
        """Give up a member. Its replies that have arrived still count, except one that waits for its turn."""
        member = self._members.pop(worker)
        if member.waiting:
            self.model.drop(member.waiting)
        return self._carry_out(self.ledger.left(worker, now, lost), now)

    def is_awaited(self, order: Order) -> bool:
        """Return whether a reply to this Order still counts: it is the first, and nothing has ended the iteration."""
        member = self._members.get(order.worker)
        return (
            member is not None
            and member.is_awaited
            and (member.incarnation, member.iteration) == (order.incarnation, order.iteration)
        )

    def update_of(self, order: Order, batch_size: int, seconds: float, loss: float | None) -> Update:
        """Return the update that a reply to this Order is."""
        return Update(order.worker, order.iteration, order.version, batch_size, seconds, loss, order.incarnation)

    def reply(self, update: Update, now: float) -> list[Order]:
        """Take the reply of a member that is awaited. The model holds it already."""
        member = self._members[update.worker]
        member.is_awaited = False
        if self.ledger.pushes_freely:
            self.ledger.turned(update.worker, now, update.compute_seconds)
            return self._carry_out(self.ledger.arrived(update, now), now)
        member.waiting = update
        return self._carry_out(self.ledger.ready(update.worker, update.batch_size, now, update.compute_seconds), now)

    def wake(self, now: float) -> list[Order]:
        """Tell the policy that the time is `wake_time` or later."""
        self.wake_time = None
        return self._carry_out(self.ledger.woke(now), now)

    def _carry_out(self, decisions: Iterable[Decision], now: float) -> list[Order]:
        """Carry out decisions, and the decisions that follow from them. Return the models to send.

        A model is sent when all decisions are carried out, so it contains all updates that were applied by them.
        """
        left, granted = deque(decisions), []
        while left:
            decision = left.popleft()
            self.ledger.note(decision, now)
            match decision:
                case Grant(worker):
                    member = self._members[worker]
                    member.iteration += 1
                    member.is_awaited = True
                    granted.append(worker)
                case Turn(worker):
                    member = self._members[worker]
                    update, member.waiting = member.waiting, None
                    if update:
                        left.extend(self.ledger.arrived(update, now))
                case Apply():
                    left.extend(self._apply(decision, now))
                case Discard(update):
                    self.model.drop(update)
                    self._decided(1)
                case Keep(update, slot):
                    self.model.keep(update, slot)
                    self._kept[slot] = update
                    self._decided(1)
                case Cancel(worker):
                    self._cancel(worker)
                case WakeAt(time):
                    self.wake_time = time
        return [self._order(worker, now) for worker in dict.fromkeys(granted) if self._members[worker].is_awaited]

    def _order(self, worker: int, now: float) -> Order:
        self.ledger.watcher.pulled(now, worker, self.version)
        member = self._members[worker]
        return Order(worker, member.incarnation, member.iteration, self.version)

    def _cancel(self, worker: int) -> None:
        """Abandon an iteration. The node is not told, since Flower has no way to; its reply is ignored."""
        member = self._members[worker]
        member.is_awaited = False
        if member.waiting:
            self.model.drop(member.waiting)
            member.waiting = None

    def _apply(self, apply: Apply, now: float) -> list[Decision]:
        compare = self.policy.compares and len(apply.updates) > 1
        kept = set(self._kept.values())
        cosines = self.model.apply(replace(apply, sums=()), compare)
        self._decided(sum(update not in kept for update in apply.updates))
        found: list[Decision] = []
        if compare:
            for update, cosine in zip(apply.updates, cosines, strict=True):
                found += self.ledger.measured("cosine", update, cosine, now)
        return found

    def _decided(self, updates: int) -> None:
        self.progress += updates / max(1, self.participants)
