"""Pipelined BSP: a slice of the model is applied and returned as soon as every member has pushed that slice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.simulate.cluster import Cluster
    from paceline.simulate.machine import Machine


class Pipeline:
    """The slices of the rounds under way. Members push them in order, and what is complete flows back in order.

    BSP keeps all members in one round until it closes; but when it has closed, a quick one may push slices of the next
    round while a slow one still pulls, so slices are counted by round. Nothing is complete before all members are
    ready, and then BSP lets nobody in; so whoever is granted for the first time takes part in the newest round from its
    first slice on. What is complete stays complete when somebody leaves.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._slices = cluster.spec.slices
        self._size = cluster.spec.model_bytes / self._slices
        self._apply_seconds = cluster.spec.apply_seconds / self._slices
        self._newest = 0  # round
        self._round: dict[Machine, int] = {}  # the round each member is in
        self._sent: dict[Machine, int] = {}  # slices of it that it has pushed
        self._pulls: dict[Machine, tuple[int, int]] = {}  # the round whose slices it pulls, and how many it has
        self._pulling: set[Machine] = set()  # to whom a slice is on its way
        self._arrived: dict[int, list[int]] = defaultdict(lambda: [0] * self._slices)  # round → pushes of each slice
        self._complete: dict[int, int] = defaultdict(int)  # round → slices that every member has pushed
        self._released: dict[int, int] = defaultdict(int)  # round → those of them that are applied and may be pulled
        self._granted: dict[Machine, Callable[[Machine], None]] = {}  # who waits for the last slice, to do what

    def join(self, machine: Machine) -> None:
        """It is granted for the first time."""
        if self._complete[self._newest]:  # that round is over, but none of its members was there to be granted
            self._begin_round()
        self._round[machine] = self._newest
        self._sent[machine] = 0

    def leave(self, machine: Machine) -> None:
        round_ = self._round.pop(machine, None)
        if round_ is None:
            return  # it never got a Grant
        for slice_ in range(self._sent.pop(machine)):
            self._arrived[round_][slice_] -= 1
        self._pulls.pop(machine, None)
        self._pulling.discard(machine)
        self._granted.pop(machine, None)
        if self._round:
            self._apply_complete(self._newest)  # perhaps only this one was missing

    def push(self, machine: Machine) -> None:
        """Send the round's slices, one after the other."""
        self._pulls[machine] = (self._round[machine], 0)
        self._pull(machine)
        self._cluster.transfer(machine, "in", self._size, self._pushed)

    def returns_to(self, machine: Machine) -> bool:
        """Has it pushed slices that will come back? A joiner has not: it pulls the model as a whole."""
        return machine in self._pulls

    def when_whole(self, machine: Machine, then: Callable[[Machine], None]) -> None:
        """It was granted: call `then` once all slices of the new model have come back to it."""
        if self._newest == self._round[machine]:
            self._begin_round()
        self._round[machine] = self._newest
        self._sent[machine] = 0
        self._granted[machine] = then
        self._finish(machine)

    def _begin_round(self) -> None:
        self._newest += 1
        counts: dict[int, Any]
        for counts in (self._arrived, self._complete, self._released):
            counts.pop(self._newest - 2, None)

    def _pushed(self, machine: Machine) -> None:
        round_, slice_ = self._round[machine], self._sent[machine]
        self._sent[machine] += 1
        if slice_ + 1 < self._slices:
            self._cluster.transfer(machine, "in", self._size, self._pushed)
        self._arrived[round_][slice_] += 1
        self._apply_complete(round_)
        if slice_ + 1 == self._slices:
            self._cluster.pushed(machine)

    def _apply_complete(self, round_: int) -> None:
        """Let the servers apply the slices that every member has pushed, each once."""
        arrived = self._arrived[round_]
        while (slice_ := self._complete[round_]) < self._slices and arrived[slice_] == len(self._round):
            self._complete[round_] += 1
            applied = self._cluster.server_time(self._apply_seconds)
            self._cluster.clock.at(applied + self._cluster.trip, self._release, (round_, slice_))

    def _release(self, what: tuple[int, int]) -> None:
        round_, slice_ = what
        self._released[round_] = slice_ + 1
        for machine, (pulls, _) in list(self._pulls.items()):
            if pulls == round_:
                self._pull(machine)

    def _pull(self, machine: Machine) -> None:
        """Send it the next slice, if there is one and none is on its way."""
        round_, got = self._pulls[machine]
        if got < self._released[round_] and machine not in self._pulling and machine.up:
            self._pulling.add(machine)
            self._cluster.transfer(machine, "out", self._size, self._pulled)

    def _pulled(self, machine: Machine) -> None:
        round_, got = self._pulls[machine]
        self._pulls[machine] = (round_, got + 1)
        self._pulling.discard(machine)
        self._pull(machine)
        self._finish(machine)

    def _finish(self, machine: Machine) -> None:
        if machine in self._granted and self._pulls[machine][1] == self._slices:
            self._granted.pop(machine)(machine)
