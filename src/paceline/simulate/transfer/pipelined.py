"""Pipelined transfers (BSP): a slice is applied and returned as soon as every member has pushed that slice."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from paceline.job import instructions
from paceline.simulate.machine import Machine
from paceline.simulate.transfer.whole import WholeTransfer

if TYPE_CHECKING:
    from paceline.simulate.cluster import Cluster


class PipelinedTransfer(WholeTransfer):
    """Carries each round slice by slice: members push the slices in order, and pull the applied ones in order.

    BSP keeps all members in one round until it closes. After that, a fast worker may push slices of the next round
    while a slow one still pulls, so slices are counted by round. No slice is complete before all members are ready, and
    from then on BSP admits no new member. So a worker that is granted for the first time takes part in the newest round
    from its first slice on. It has nothing to get back, and pulls the model as a whole. A slice that is complete stays
    complete when a member leaves.
    """

    def __init__(self, cluster: Cluster, in_turn: bool) -> None:
        super().__init__(cluster, in_turn)
        self._slices = cluster.spec.slices
        self._pushed_slice, self._pulled_slice = self._update_bytes / self._slices, self._reply_bytes / self._slices
        self._slice_apply_seconds = cluster.spec.apply_seconds / self._slices
        self._newest = 0  # round
        self._round: dict[Machine, int] = {}  # member → the round it is in
        self._sent: dict[Machine, int] = {}  # member → the number of slices of that round that it has pushed
        self._pulls: dict[Machine, tuple[int, int]] = {}  # member → the round that it pulls, and how many slices it has
        self._pulling: set[Machine] = set()  # members to which a slice is on the way
        self._granted: set[Machine] = set()  # members that compute once they have their last slice
        self._arrived: dict[int, list[int]] = defaultdict(lambda: [0] * self._slices)  # round → pushes of each slice
        self._complete: dict[int, int] = defaultdict(int)  # round → the number of slices that every member has pushed
        self._released: dict[int, int] = defaultdict(int)  # round → how many of them are applied and can be pulled

    # Membership

    def enter_round(self, machine: Machine) -> None:
        """Make a worker a member of the newest round when it is granted for the first time."""
        if machine in self._pulls:
            return
        if self._complete[self._newest]:  # the round is over, but none of its members is left to be granted
            self._begin_round()
        self._round[machine] = self._newest
        self._sent[machine] = 0

    def leave(self, machine: Machine) -> None:
        round_ = self._round.pop(machine, None)
        if round_ is None:
            return  # it was never granted
        for slice_ in range(self._sent.pop(machine)):
            self._arrived[round_][slice_] -= 1
        self._pulls.pop(machine, None)
        self._pulling.discard(machine)
        self._granted.discard(machine)
        if self._round:
            self._apply_complete(self._newest)  # some slices may have waited for this member alone

    def granted(self, machine: Machine) -> None:
        """Let a granted worker compute once all slices of its last round have come back to it."""
        if machine not in self._pulls:
            super().granted(machine)
            return
        self._servers.catch_up(math.inf)
        if self._model:
            self._model.pull(machine.number, machine.expected)
        if self._newest == self._round[machine]:
            self._begin_round()
        self._round[machine] = self._newest
        self._sent[machine] = 0
        self._granted.add(machine)
        self._compute_if_complete(machine)

    def _begin_round(self) -> None:
        self._newest += 1
        counts: dict[int, Any]
        for counts in (self._arrived, self._complete, self._released):
            counts.pop(self._newest - 2, None)

    # Slices

    def _send_gradient(self, machine: Machine) -> None:
        self._pulls[machine] = (self._round[machine], 0)
        self._pull_slice(machine)
        machine.transfer("in", self._pushed_slice, self._slice_pushed)

    def _slice_pushed(self, machine: Machine) -> None:
        round_, slice_ = self._round[machine], self._sent[machine]
        self._sent[machine] += 1
        if slice_ + 1 < self._slices:
            machine.transfer("in", self._pushed_slice, self._slice_pushed)
        self._arrived[round_][slice_] += 1
        self._apply_complete(round_)
        if slice_ + 1 == self._slices:
            self._cluster.update_arrived(machine)

    def _apply_complete(self, round_: int) -> None:
        """Let the servers apply the slices that every member has pushed, each once."""
        arrived = self._arrived[round_]
        while (slice_ := self._complete[round_]) < self._slices and arrived[slice_] == len(self._round):
            self._complete[round_] += 1
            applied_at = self._servers.work(self._slice_apply_seconds)
            self._clock.at(applied_at + self._cluster.message_seconds, self._release, (round_, slice_))

    def _release(self, applied: tuple[int, int]) -> None:
        """Let the members of a round pull a slice that the servers have applied."""
        round_, slice_ = applied
        self._released[round_] = slice_ + 1
        for machine, (pulls, _) in list(self._pulls.items()):
            if pulls == round_:
                self._pull_slice(machine)

    def _pull_slice(self, machine: Machine) -> None:
        """Send a member its next slice, if one is released and none is on the way."""
        round_, received = self._pulls[machine]
        if received < self._released[round_] and machine not in self._pulling and machine.up:
            self._pulling.add(machine)
            machine.transfer("out", self._pulled_slice, self._slice_pulled)

    def _slice_pulled(self, machine: Machine) -> None:
        round_, received = self._pulls[machine]
        self._pulls[machine] = (round_, received + 1)
        self._pulling.discard(machine)
        self._pull_slice(machine)
        self._compute_if_complete(machine)

    def _compute_if_complete(self, machine: Machine) -> None:
        if machine in self._granted and self._pulls[machine][1] == self._slices:
            self._granted.discard(machine)
            self._cluster.model_arrived(machine)

    def apply(self, order: instructions.OrderApply) -> None:
        """Note the new version. The servers have already applied it, slice by slice."""
        self._servers.apply(self._clock.now, order.version, order.decision)
        self._servers.catch_up(self._clock.now)
