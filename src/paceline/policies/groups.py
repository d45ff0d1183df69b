"""Groups: one policy inside each group, another one across the groups.

A worker belongs to group id mod `count`. To the outer policy, a group is one worker:
 - When the inner policy applies updates, the group's update has arrived at the outer policy.
 - When the outer policy applies the group's update, these updates are applied.
 - When the outer policy grants the group, the Grants that the inner policy has made are sent out.
 - Updates that the inner policy applies while the group's update waits are added to it.
 - When the outer policy cancels the group, the group starts again from the newest model.

FL-R²SP (ToN 2026) is `groups:count=8,inner=(bsp:fraction=0.75),outer=r2sp`. Inside a group, a barrier applies the first
fraction C of the updates; late updates are discarded, and their workers receive the newest model. Across the groups,
R²SP gives turns.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import replace
from typing import Annotated

from paceline.policies.components import WakeTimes
from paceline.policies.contract import (
    Add,
    Apply,
    Cancel,
    Decisions,
    Discard,
    Grant,
    Keep,
    Policy,
    Update,
    WakeAt,
    WorkerId,
)
from paceline.policies.options import PolicyError, Range
from paceline.policies.registry import make

OUTER = -1  # the outer policy, where groups are numbered from 0


class GroupUpdate:
    """One or more Applies of an inner policy, which the outer policy sees as one update."""

    def __init__(self, apply: Apply, settles: list[Update]) -> None:
        self.applies = [apply]
        self.settles = settles  # its updates, without those that the inner policy keeps

    def add(self, other: GroupUpdate) -> None:
        self.applies += other.applies
        self.settles += other.settles


class Group:
    """One group: its inner policy and its state under the outer policy.

    An update has two forms: as the inner policy knows it, and as it was sent. They differ after a Cancel: then the
    inner policy counts the iterations of a worker anew, and the driver does not.
    """

    def __init__(self, inner: Policy) -> None:
        self.inner = inner
        self.granted: dict[WorkerId, int] = {}  # member → number of its Grants
        self.skipped: dict[WorkerId, int] = {}  # member → those of them that an earlier inner policy gave
        self.running: dict[WorkerId, None] = {}  # members that hold an unanswered Grant
        self.unsettled: dict[Update, Update] = {}  # update → as sent, until the inner policy decides on it
        self.kept: dict[int, tuple[Update, Update]] = {}  # slot → what the inner policy keeps there, and as sent
        self.incarnation = 0  # how often the group has joined the outer policy, each time with its first member
        self.iteration = 0  # Grants of the outer policy to this incarnation
        self.expected: int | None = None  # expected staleness of the outer policy's Grant
        self.open = False  # whether the outer policy has granted the group
        self.waiting: GroupUpdate | None = None  # the update that the outer policy has not decided on
        self.held: deque[GroupUpdate | Keep | Grant] = deque()  # held back until the outer policy's Grant, in order


class Groups(Policy):
    summary = "`inner` inside each group, `outer` across the groups (FL-R²SP)"

    def __init__(
        self,
        count: Annotated[int, Range(1), "the number of groups; a worker's group is its id mod count"] = 4,
        inner: Annotated[Policy | str, "the policy inside a group"] = "bsp",
        outer: Annotated[Policy | str, "the policy across the groups"] = "r2sp",
    ) -> None:
        self.count = count
        self.inner = make(inner) if isinstance(inner, str) else inner
        self.outer = make(outer) if isinstance(outer, str) else outer
        if getattr(self.outer, "tuner", None):
            raise PolicyError("groups: only inner can tune batches, so leave tune_batches out of outer.")
        if self.inner.keeps and self.outer.keeps:
            raise PolicyError(
                "groups: inner and outer cannot both keep updates, so choose another policy for one of them."
            )
        if self.inner.pipelined or self.outer.pipelined:  # a Stream names the members of one barrier
            raise PolicyError("groups: neither inner nor outer can be pipelined, so leave pipeline=true out.")
        self.takes_turns = self.outer.takes_turns
        self.keeps = self.inner.keeps or self.outer.keeps
        self.mixes = self.inner.mixes or self.outer.mixes
        self.hears_loss = self.inner.hears_loss or self.outer.hears_loss
        self.groups: dict[int, Group] = {}
        self.undecided: dict[Update, GroupUpdate] = {}  # the updates that the outer policy has not decided on
        self.kept: dict[int, tuple[Update, GroupUpdate]] = {}  # slot → what the outer policy keeps there
        self.slots: dict[tuple[int, int], list[int]] = {}  # group or OUTER, and its slot → the driver's slots for it
        self.slots_used = 0
        self.sums: dict[tuple[int, int], int] = {}  # group, and its running sum → the driver's sum for it
        self.sums_used = 0
        self.wakes = WakeTimes()  # of the groups and of OUTER

    @property
    def least_workers(self) -> int:
        return max(self.count, self.outer.least_workers) * self.inner.least_workers

    # Events

    def joined(self, worker: WorkerId, now: float) -> Decisions:
        number = worker % self.count
        group = self.groups.get(number)
        if group is None:
            group = self.groups[number] = Group(copy.deepcopy(self.inner))
        first = not group.granted
        group.granted[worker] = group.skipped[worker] = 0
        out: Decisions = []
        self._inside(number, group.inner.joined(worker, now), now, out)
        if first:
            group.incarnation += 1
            group.iteration = 0
            self._across(self.outer.joined(number, now), now, out)
        return out + self.wakes.next()

    def arrived(self, update: Update, now: float) -> Decisions:
        worker = update.worker
        number = worker % self.count
        group = self.groups.get(number)
        if group is None or worker not in group.granted:
            return [Discard(update)]
        if update.iteration <= group.skipped[worker]:
            return [Discard(update)]  # it began before the outer policy cancelled the group
        if update.iteration == group.granted[worker]:
            group.running.pop(worker, None)
        sent = update
        if group.skipped[worker]:
            update = replace(update, iteration=update.iteration - group.skipped[worker])
        group.unsettled[update] = sent
        out: Decisions = []
        self._inside(number, group.inner.arrived(update, now), now, out)
        return out + self.wakes.next()

    def measured(self, kind: str, subject: object, value: float, now: float) -> Decisions:
        out: Decisions = []
        if kind == "own_batch" and isinstance(subject, WorkerId):
            number = subject % self.count
            if group := self.groups.get(number):
                self._inside(number, group.inner.measured(kind, subject, value, now), now, out)
            return out + self.wakes.next()
        if subject is not None:
            return []
        self.inner.measured(kind, None, value, now)  # groups that form later copy this policy
        for number, group in self.groups.items():
            self._inside(number, group.inner.measured(kind, None, value, now), now, out)
        self._across(self.outer.measured(kind, None, value, now), now, out)
        return out + self.wakes.next()

    def left(self, worker: WorkerId, now: float) -> Decisions:
        number = worker % self.count
        group = self.groups.get(number)
        if group is None or worker not in group.granted:
            return []
        out: Decisions = []
        decisions = group.inner.left(worker, now)
        for place in (group.granted, group.skipped, group.running):
            place.pop(worker, None)
        group.held = deque(held for held in group.held if not (isinstance(held, Grant) and held.worker == worker))
        self._inside(number, decisions, now, out)
        if not group.granted:
            self._drop(number, out)  # the outer policy does not know of these updates, so they would get no turn
            group.waiting = None
            self._across(self.outer.left(number, now), now, out)
        return out + self.wakes.next()

    def woke(self, now: float) -> Decisions:
        out: Decisions = []
        for source in self.wakes.due(now):
            if source == OUTER:
                self._across(self.outer.woke(now), now, out)
            else:
                self._inside(source, self.groups[source].inner.woke(now), now, out)
        return out + self.wakes.next()

    # Decisions of the inner policies

    def _inside(self, number: int, decisions: Decisions, now: float, out: Decisions) -> None:
        """Carry out the decisions of a group's inner policy, as far as the outer policy allows."""
        group = self.groups[number]
        for decision in decisions:
            match decision:
                case WakeAt(time):
                    self.wakes.set(number, time)
                case Discard(update):
                    out.append(Discard(group.unsettled.pop(update)))
                case Cancel(worker):
                    group.running.pop(worker, None)
                    out.append(decision)
                case Add(update, inner_sum, weight):
                    out.append(Add(group.unsettled[update], self._sum(number, inner_sum), weight))
                case Apply():
                    group_update = self._group_update(group, decision, number)
                    if group.waiting and all(isinstance(held, Grant) for held in group.held):
                        group.waiting.add(group_update)
                    else:
                        group.held.append(group_update)
                case Keep(update, slot):
                    sent = group.unsettled.pop(update)
                    group.kept[slot] = (update, sent)
                    group.held.append(Keep(sent, self._slots(number, slot, 1)[0]))
                case Grant():
                    group.held.append(decision)
        self._send_held(number, now, out)

    def _send_held(self, number: int, now: float, out: Decisions) -> None:
        """Send out the held decisions, up to the next update that the outer policy must decide on."""
        group = self.groups[number]
        while group.open and group.held:
            held = group.held.popleft()
            match held:
                case Grant(worker, batch_size, expected):
                    group.granted[worker] += 1
                    group.running[worker] = None
                    out.append(Grant(worker, batch_size, expected if group.expected is None else group.expected))
                case Keep():
                    out.append(held)
                case GroupUpdate():
                    group.open, group.waiting = False, held
                    updates = [update for apply in held.applies for update in apply.updates]
                    update = Update(
                        worker=number,
                        iteration=group.iteration,
                        base_version=min(update.base_version for update in updates),
                        batch_size=sum(update.batch_size for update in updates),
                        compute_seconds=max(update.compute_seconds for update in updates),
                        incarnation=group.incarnation,
                    )
                    self.undecided[update] = held
                    self._across(self.outer.arrived(update, now), now, out)

    def _sum(self, number: int, inner_sum: int) -> int:
        """Return the driver's running sum for a running sum of a group's inner policy."""
        if (number, inner_sum) not in self.sums:
            self.sums[number, inner_sum] = self.sums_used
            self.sums_used += 1
        return self.sums[number, inner_sum]

    def _group_update(self, group: Group, apply: Apply, number: int) -> GroupUpdate:
        """Return an inner policy's Apply as an update of its group."""
        kept = dict(group.kept.values())
        settles = {update: group.unsettled.pop(update) for update in apply.updates if update not in kept}
        sent = tuple(settles.get(update) or kept[update] for update in apply.updates)
        sums = tuple((self.sums.pop((number, inner_sum)), factor) for inner_sum, factor in apply.sums)
        return GroupUpdate(replace(apply, updates=sent, sums=sums), list(settles.values()))

    # Decisions of the outer policy

    def _across(self, decisions: Decisions, now: float, out: Decisions) -> None:
        """Carry out the decisions of the outer policy."""
        granted = []
        for decision in decisions:
            match decision:
                case WakeAt(time):
                    self.wakes.set(OUTER, time)
                case Grant(number, _, expected):
                    group = self.groups[number]
                    group.iteration += 1
                    group.open, group.expected = True, expected
                    granted.append(number)
                case Apply():
                    self._apply(decision, out)
                case Discard(update):
                    out += [Discard(member_update) for member_update in self._decided(update).settles]
                case Keep(update, slot):
                    self._keep(update, slot, out)
                case Cancel(number):
                    self._restart(number, now, out)
        for number in granted:
            self._send_held(number, now, out)

    def _decided(self, update: Update) -> GroupUpdate:
        """Return the group's update behind an update of the outer policy, which has now decided on it."""
        group_update = self.undecided.pop(update)
        group = self.groups[update.worker]
        if group.waiting is group_update:
            group.waiting = None
        return group_update

    def _apply(self, outer_apply: Apply, out: Decisions) -> None:
        """Apply the updates of the groups' members that stand behind an Apply of the outer policy."""
        kept = dict(self.kept.values())
        updates: list[Update] = []
        weights: list[float] = []
        sums: list[tuple[int, float]] = []
        for update, weight in zip(outer_apply.updates, outer_apply.weights, strict=True):
            applies = (kept.get(update) or self._decided(update)).applies
            if outer_apply.mix is not None:  # a group then counts as the mean of its members' models
                weight /= sum(sum(apply.weights) for apply in applies)
            for apply in applies:
                if apply.mix is not None:
                    out.append(replace(apply, mix=min(1.0, apply.mix * weight)))
                else:
                    updates += apply.updates
                    weights += [weight * inner_weight for inner_weight in apply.weights]
                    sums += [(number, weight * factor) for number, factor in apply.sums]
        if updates:
            out.append(Apply(tuple(updates), tuple(weights), outer_apply.mix, tuple(sums)))

    def _keep(self, update: Update, slot: int, out: Decisions) -> None:
        group_update = self._decided(update)
        self.kept[slot] = (update, group_update)
        slots = self._slots(OUTER, slot, len(group_update.settles))
        out += [Keep(member_update, place) for member_update, place in zip(group_update.settles, slots, strict=False)]

    def _slots(self, source: int, slot: int, count: int) -> list[int]:
        """Return at least `count` of the driver's slots for one slot of a group's inner policy, or of the outer one."""
        slots = self.slots.setdefault((source, slot), [])
        while len(slots) < count:
            slots.append(self.slots_used)
            self.slots_used += 1
        return slots

    def _restart(self, number: int, now: float, out: Decisions) -> None:
        """Cancel a group: drop its updates and start it again from the newest model."""
        group = self.groups[number]
        out += [Cancel(worker) for worker in group.running]
        out += [Discard(update) for update in group.unsettled.values()]
        self._drop(number, out)
        group.inner = copy.deepcopy(self.inner)
        self.sums = {key: known for key, known in self.sums.items() if key[0] != number}
        group.running.clear()
        group.unsettled.clear()
        self.wakes.cancel(number)
        group.skipped.update(group.granted)
        for worker in group.granted:
            self._inside(number, group.inner.joined(worker, now), now, out)

    def _drop(self, number: int, out: Decisions) -> None:
        """Close a group and discard the updates that it holds back."""
        group = self.groups[number]
        for held in group.held:
            match held:
                case Keep(update):
                    out.append(Discard(update))
                case GroupUpdate():
                    out += [Discard(update) for update in held.settles]
        for slot in group.kept:
            del self.slots[number, slot]  # not used again: an update that waits may still name the kept one
        group.held.clear()
        group.kept.clear()
        group.open = False
