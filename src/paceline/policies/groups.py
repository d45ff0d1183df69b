"""Groups: one policy within each group, another across the groups.

Members are mapped to groups by id mod `count`. To the outer policy a group is one worker: when the inner policy
applies, the group's update has arrived; when the outer policy applies that, it is applied; and when the outer policy
grants the group, the Grants that the inner policy has given meanwhile go out. What the inner policy applies while the
group's update still waits goes with it.

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


class Group:
    """One group: its inner policy, and how it stands with the outer one."""

    def __init__(self, inner: Policy) -> None:
        self.inner = inner
        self.granted: dict[WorkerId, int] = {}  # member → Grants it was given
        self.skipped: dict[WorkerId, int] = {}  # member → those of them that the present inner policy did not give
        self.running: dict[WorkerId, None] = {}  # members with a Grant not yet answered
        self.unsettled: dict[Update, None] = {}  # arrived, and the inner policy has not decided
        self.iteration = 0  # the outer policy's Grants to this group
        self.expected: int | None = None  # staleness, as the outer policy foresees it
        self.open = False  # has the outer policy let the group go?
        self.waiting: list[Apply] | None = None  # what the outer policy was told of and has not decided
        self.held: deque[Apply | Keep | Grant] = deque()  # what waits for the outer policy's Grant, in order


class Groups(Policy):
    summary = "`inner` within each group, `outer` across groups; FL-R²SP: a fractional barrier inside, r2sp outside"

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
        self.takes_turns = self.outer.takes_turns
        self.groups: dict[int, Group] = {}
        self.told: dict[Update, list[list[Apply]]] = {}  # a group's update → what it stands for
        self.kept: dict[int, Update] = {}  # slot → the group's update that is kept there
        self.wakes: dict[int, float] = {}  # group, or OUTER → when it wants to be woken
        self.wake_heap: list[tuple[float, int]] = []
        self.wake = math.inf  # when the driver is to wake us

    # What happens

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
        if group.skipped[worker]:
            update = replace(update, iteration=update.iteration - group.skipped[worker])
        group.unsettled[update] = None
        out: Decisions = []
        self._inside(number, group.inner.arrived(update, now), now, out)
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
            out += [held for held in group.held if not isinstance(held, Grant)]  # they count, and no turn will come
            group.held.clear()
            group.open, group.waiting = False, None
            self.wakes.pop(number, None)
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
                    group.unsettled.pop(update, None)
                    out.append(Discard(self._as_sent(group, update)))
                case Cancel(worker):
                    group.running.pop(worker, None)
                    out.append(decision)
                case Apply():
                    apply = self._settled(group, decision)
                    if group.waiting is not None and not any(isinstance(held, Apply) for held in group.held):
                        group.waiting.append(apply)
                    else:
                        group.held.append(apply)
                case Keep(update, slot):
                    group.unsettled.pop(update, None)
                    group.held.append(Keep(self._as_sent(group, update), slot))
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
                case Apply(updates):
                    group.open, group.waiting = False, [held]
                    update = Update(
                        worker=number,
                        iteration=group.iteration,
                        base_version=min(update.base_version for update in updates),
                        batch_size=sum(update.batch_size for update in updates),
                        compute_seconds=max(update.compute_seconds for update in updates),
                    )
                    self.told.setdefault(update, []).append(group.waiting)
                    self._across(self.outer.arrived(update, now), now, out)

    @staticmethod
    def _as_sent(group: Group, update: Update) -> Update:
        """The update as its worker numbered it."""
        skipped = group.skipped.get(update.worker, 0)
        return replace(update, iteration=update.iteration + skipped) if skipped else update

    def _settled(self, group: Group, apply: Apply) -> Apply:
        for update in apply.updates:
            group.unsettled.pop(update, None)
        return replace(apply, updates=tuple(self._as_sent(group, update) for update in apply.updates))

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
                    out += [Discard(member) for apply in self._decided(update) for member in apply.updates]
                case Keep(update, slot):
                    self._keep(update, slot, out)
                case Cancel(number):
                    self._start_anew(number, now, out)
        for number in going:
            self._let_go(number, now, out)

    def _decided(self, update: Update) -> list[Apply]:
        """What a group's update stands for, which waits no longer."""
        if update in self.kept.values():
            return self.told[update][0]
        bundles = self.told[update]
        bundle = bundles.pop(0)
        if not bundles:
            del self.told[update]
        group = self.groups[update.worker]
        if group.waiting is bundle:
            group.waiting = None
        return bundle

    def _apply(self, across: Apply, out: Decisions) -> None:
        updates: list[Update] = []
        weights: list[float] = []
        for update, weight in zip(across.updates, across.weights, strict=True):
            for inside in self._decided(update):
                if inside.mix is not None:
                    out.append(replace(inside, mix=min(1.0, inside.mix * weight)))
                else:
                    updates += inside.updates
                    weights += [weight * inner for inner in inside.weights]
        if updates:
            out.append(Apply(tuple(updates), tuple(weights), across.mix))

    def _keep(self, update: Update, slot: int, out: Decisions) -> None:
        bundle = self._decided(update)
        out += [Keep(member, member.worker) for apply in bundle for member in apply.updates]
        old = self.kept.get(slot)
        if old is not None:
            self.told.pop(old, None)
        self.kept[slot] = update
        self.told[update] = [bundle]

    def _start_anew(self, number: int, now: float, out: Decisions) -> None:
        """The outer policy has cancelled the group: drop what it has and start it again from the newest model."""
        group = self.groups[number]
        out += [Cancel(worker) for worker in group.running]
        out += [Discard(self._as_sent(group, update)) for update in group.unsettled]
        for held in group.held:
            if isinstance(held, Apply):
                out += [Discard(update) for update in held.updates]
        group.inner = copy.deepcopy(self.inner)
        group.running.clear()
        group.unsettled.clear()
        group.held.clear()
        group.open = False
        self.wakes.pop(number, None)
        group.skipped.update(group.granted)
        for worker in group.granted:
            self._inside(number, group.inner.joined(worker, now), now, out)

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
