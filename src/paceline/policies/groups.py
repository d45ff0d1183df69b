"""Groups: one policy within each group, another across the groups.

Members are mapped to groups by id mod `count`. To the outer policy a group is one worker: when the inner policy
applies, the group's update has arrived; when the outer policy applies that, it is applied; and when the outer policy
grants the group, the Grants that the inner policy has given meanwhile go out. What the inner policy applies while the
group's update still waits goes with it. When the outer policy cancels a group, it starts again from the newest model.

FL-R²SP (ToN 2026) is `groups:count=8,inner=(bsp:fraction=0.75),outer=r2sp`: a barrier inside that takes the first
fraction C and discards the late, who are sent the newest model, and round robin outside.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections import deque
from dataclasses import replace
from typing import Annotated

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

OUTER = -1  # whose wake it is, where groups are numbered from 0


class GroupUpdate:
    """What the inner policy applied; the outer policy is told of it as one update."""

    def __init__(self, apply: Apply, settles: list[Update]) -> None:
        self.applies = [apply]
        self.settles = settles  # all the updates in it but those that are kept besides

    def add(self, other: GroupUpdate) -> None:
        self.applies += other.applies
        self.settles += other.settles


class Group:
    """One group: its inner policy, and how it stands with the outer one."""

    def __init__(self, inner: Policy) -> None:
        self.inner = inner
        self.granted: dict[WorkerId, int] = {}  # member → Grants it was given
        self.skipped: dict[WorkerId, int] = {}  # member → those of them that the present inner policy did not give
        self.running: dict[WorkerId, None] = {}  # members with a Grant not yet answered
        # Updates as the inner policy knows them → as they were sent; the two are numbered differently after a skip.
        self.unsettled: dict[Update, Update] = {}  # arrived, and the inner policy has not decided
        self.kept: dict[int, tuple[Update, Update]] = {}  # slot → what the inner policy keeps there
        self.incarnation = 0  # how often it has joined the outer policy: each time that its first member comes
        self.iteration = 0  # the outer policy's Grants to this group since then
        self.expected: int | None = None  # staleness, as the outer policy foresees it
        self.open = False  # has the outer policy let the group go?
        self.waiting: GroupUpdate | None = None  # what the outer policy was told of and has not decided
        self.held: deque[GroupUpdate | Keep | Grant] = deque()  # what waits for the outer policy's Grant, in order


class Groups(Policy):
    summary = "`inner` within each group, `outer` across groups (FL-R²SP)"

    def __init__(
        self,
        count: Annotated[int, Range(1), "how many groups; a member's is its id mod count"] = 4,
        inner: Annotated[Policy | str, "the policy within a group"] = "bsp",
        outer: Annotated[Policy | str, "the policy across groups"] = "r2sp",
    ) -> None:
        self.count = count
        self.inner = make(inner) if isinstance(inner, str) else inner
        self.outer = make(outer) if isinstance(outer, str) else outer
        if getattr(self.outer, "tuner", None):
            raise PolicyError("groups: only inner can tune batches, so leave tune_batches out of outer.")
        if self.inner.keeps and self.outer.keeps:
            raise PolicyError(
                "groups: inner and outer cannot both keep updates, so one of them must be another policy."
            )
        if self.inner.pipelined or self.outer.pipelined:  # a Stream is of the members of one barrier
            raise PolicyError("groups: neither inner nor outer can be pipelined, so leave pipeline=true out.")
        self.takes_turns = self.outer.takes_turns
        self.keeps = self.inner.keeps or self.outer.keeps
        self.mixes = self.inner.mixes or self.outer.mixes
        self.hears_loss = self.inner.hears_loss or self.outer.hears_loss
        self.groups: dict[int, Group] = {}
        self.told: dict[Update, GroupUpdate] = {}  # a group's update → what it stands for, until it is decided
        self.kept: dict[int, tuple[Update, GroupUpdate]] = {}  # slot → what the outer policy keeps there
        self.slots: dict[tuple[int, int], list[int]] = {}  # whose slot, and which → the slots that stand for it
        self.slots_used = 0
        self.sums: dict[tuple[int, int], int] = {}  # whose running sum, and which → the one that stands for it
        self.sums_used = 0
        self.wakes: dict[int, float] = {}  # group, or OUTER → when it wants to be woken
        self.wake_heap: list[tuple[float, int]] = []
        self.wake = math.inf  # when the driver is to wake us

    # What happens

    @property
    def least_workers(self) -> int:
        return max(self.count, self.outer.least_workers) * self.inner.least_workers

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
        return self._with_wake(out)

    def arrived(self, update: Update, now: float) -> Decisions:
        worker = update.worker
        number = worker % self.count
        group = self.groups.get(number)
        if group is None or worker not in group.granted:
            return [Discard(update)]
        if update.iteration <= group.skipped[worker]:
            return [Discard(update)]  # begun before the outer policy cancelled the group
        if update.iteration == group.granted[worker]:
            group.running.pop(worker, None)
        sent = update
        if group.skipped[worker]:
            update = replace(update, iteration=update.iteration - group.skipped[worker])
        group.unsettled[update] = sent
        out: Decisions = []
        self._inside(number, group.inner.arrived(update, now), now, out)
        return self._with_wake(out)

    def measured(self, kind: str, subject: object, value: float, now: float) -> Decisions:
        if subject is not None:
            return []
        out: Decisions = []
        self.inner.measured(kind, None, value, now)  # groups that come later are copies of it
        for number, group in self.groups.items():
            self._inside(number, group.inner.measured(kind, None, value, now), now, out)
        self._across(self.outer.measured(kind, None, value, now), now, out)
        return self._with_wake(out)

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
            self._drop(number, out)  # what the outer policy has not been told of has no turn to come
            group.waiting = None
            self._across(self.outer.left(number, now), now, out)
        return self._with_wake(out)

    def woke(self, now: float) -> Decisions:
        self.wake = math.inf
        due = []
        while self.wake_heap and self.wake_heap[0][0] <= now:
            time, source = heapq.heappop(self.wake_heap)
            if self.wakes.get(source) == time:
                del self.wakes[source]
                due.append(source)
        out: Decisions = []
        for source in due:
            if source == OUTER:
                self._across(self.outer.woke(now), now, out)
            else:
                self._inside(source, self.groups[source].inner.woke(now), now, out)
        return self._with_wake(out)

    # Decisions of the inner policies

    def _inside(self, number: int, decisions: Decisions, now: float, out: Decisions) -> None:
        group = self.groups[number]
        for decision in decisions:
            match decision:
                case WakeAt(time):
                    self._wake_at(number, time)
                case Discard(update):
                    out.append(Discard(group.unsettled.pop(update)))
                case Cancel(worker):
                    group.running.pop(worker, None)
                    out.append(decision)
                case Add(update, number_inside, weight):
                    out.append(Add(group.unsettled[update], self._sum(number, number_inside), weight))
                case Apply():
                    bundle = self._bundle(group, decision, number)
                    if group.waiting and all(isinstance(held, Grant) for held in group.held):
                        group.waiting.add(bundle)
                    else:
                        group.held.append(bundle)
                case Keep(update, slot):
                    sent = group.unsettled.pop(update)
                    group.kept[slot] = (update, sent)
                    group.held.append(Keep(sent, self._slots(number, slot, 1)[0]))
                case Grant():
                    group.held.append(decision)
        self._let_go(number, now, out)

    def _let_go(self, number: int, now: float, out: Decisions) -> None:
        """Send out what was held, as far as the outer policy has allowed."""
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
                    self.told[update] = held
                    self._across(self.outer.arrived(update, now), now, out)

    def _sum(self, number: int, inside: int) -> int:
        """The sum that stands for one of an inner policy's."""
        if (number, inside) not in self.sums:
            self.sums[number, inside] = self.sums_used
            self.sums_used += 1
        return self.sums[number, inside]

    def _bundle(self, group: Group, apply: Apply, number: int) -> GroupUpdate:
        kept = dict(group.kept.values())
        settles = {update: group.unsettled.pop(update) for update in apply.updates if update not in kept}
        sent = tuple(settles.get(update) or kept[update] for update in apply.updates)
        sums = tuple((self.sums.pop((number, inside)), factor) for inside, factor in apply.sums)
        return GroupUpdate(replace(apply, updates=sent, sums=sums), list(settles.values()))

    # Decisions of the outer policy

    def _across(self, decisions: Decisions, now: float, out: Decisions) -> None:
        going = []
        for decision in decisions:
            match decision:
                case WakeAt(time):
                    self._wake_at(OUTER, time)
                case Grant(number, _, expected):
                    group = self.groups[number]
                    group.iteration += 1
                    group.open, group.expected = True, expected
                    going.append(number)
                case Apply():
                    self._apply(decision, out)
                case Discard(update):
                    out += [Discard(member) for member in self._decided(update).settles]
                case Keep(update, slot):
                    self._keep(update, slot, out)
                case Cancel(number):
                    self._start_anew(number, now, out)
        for number in going:
            self._let_go(number, now, out)

    def _decided(self, update: Update) -> GroupUpdate:
        """What a group's update stands for, which waits no longer."""
        bundle = self.told.pop(update)
        group = self.groups[update.worker]
        if group.waiting is bundle:
            group.waiting = None
        return bundle

    def _apply(self, across: Apply, out: Decisions) -> None:
        kept = dict(self.kept.values())
        updates: list[Update] = []
        weights: list[float] = []
        sums: list[tuple[int, float]] = []
        for update, weight in zip(across.updates, across.weights, strict=True):
            inside = (kept.get(update) or self._decided(update)).applies
            if across.mix is not None:  # then a group counts as the mean of what it pushed
                weight /= sum(sum(apply.weights) for apply in inside)
            for apply in inside:
                if apply.mix is not None:
                    out.append(replace(apply, mix=min(1.0, apply.mix * weight)))
                else:
                    updates += apply.updates
                    weights += [weight * inner for inner in apply.weights]
                    sums += [(number, weight * factor) for number, factor in apply.sums]
        if updates:
            out.append(Apply(tuple(updates), tuple(weights), across.mix, tuple(sums)))

    def _keep(self, update: Update, slot: int, out: Decisions) -> None:
        bundle = self._decided(update)
        self.kept[slot] = (update, bundle)
        slots = self._slots(OUTER, slot, len(bundle.settles))
        out += [Keep(member, place) for member, place in zip(bundle.settles, slots, strict=False)]

    def _slots(self, whose: int, slot: int, count: int) -> list[int]:
        """At least `count` slots that stand for one of an inner policy's, or of the outer one's."""
        slots = self.slots.setdefault((whose, slot), [])
        while len(slots) < count:
            slots.append(self.slots_used)
            self.slots_used += 1
        return slots

    def _start_anew(self, number: int, now: float, out: Decisions) -> None:
        """The outer policy has cancelled the group: drop what it has and start it again from the newest model."""
        group = self.groups[number]
        out += [Cancel(worker) for worker in group.running]
        out += [Discard(update) for update in group.unsettled.values()]
        self._drop(number, out)
        group.inner = copy.deepcopy(self.inner)
        self.sums = {key: known for key, known in self.sums.items() if key[0] != number}
        group.running.clear()
        group.unsettled.clear()
        self.wakes.pop(number, None)
        group.skipped.update(group.granted)
        for worker in group.granted:
            self._inside(number, group.inner.joined(worker, now), now, out)

    def _drop(self, number: int, out: Decisions) -> None:
        """Close the group and drop what it holds."""
        group = self.groups[number]
        for held in group.held:
            match held:
                case Keep(update):
                    out.append(Discard(update))
                case GroupUpdate():
                    out += [Discard(update) for update in held.settles]
        for slot in group.kept:
            del self.slots[number, slot]  # what waits may name what is there, so these slots are not used again
        group.held.clear()
        group.kept.clear()
        group.open = False

    # Waking

    def _wake_at(self, source: int, time: float) -> None:
        self.wakes[source] = time
        heapq.heappush(self.wake_heap, (time, source))

    def _with_wake(self, out: Decisions) -> Decisions:
        heap = self.wake_heap
        while heap and self.wakes.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        if heap and heap[0][0] < self.wake:
            self.wake = heap[0][0]
            out.append(WakeAt(self.wake))
        return out
