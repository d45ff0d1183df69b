"""Streamed transfers: each slice is applied when it arrives and returned at once, so a push and a pull overlap."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

from paceline.job import instructions
from paceline.simulate.machine import Machine
from paceline.simulate.transfer.whole import WholeTransfer

if TYPE_CHECKING:
    from paceline.simulate.cluster import Cluster

#: Where the slices are that a worker has pushed: on the way back (and perhaps awaited, after a Grant), or all back.
Return: TypeAlias = Literal["coming", "awaited", "complete"]


class PushesTogether:
    """The pushes of one Stream. A slice is applied and returned to all of their workers once each has sent it."""

    def __init__(self, waits_for: set[Machine]) -> None:
        self.waits_for = waits_for  # workers whose pushes have not begun
        self.began: list[Machine] = []
        self.ended: list[Machine] = []  # of these, the ones whose whole push is at the servers
        self.ended_at = -math.inf  # when all of them had ended

    @property
    def is_complete(self) -> bool:
        return not self.waits_for and len(self.ended) == len(self.began)

    def remove(self, machine: Machine) -> None:
        """Wait no longer for a worker."""
        self.waits_for.discard(machine)
        for members in (self.began, self.ended):
            if machine in members:
                members.remove(machine)


class StreamedTransfer(WholeTransfer):
    """Returns what workers push, one slice behind. A worker that has nothing to get back pulls the whole model."""

    def __init__(self, cluster: Cluster, in_turn: bool) -> None:
        super().__init__(cluster, in_turn)
        self._returns: dict[Machine, Return] = {}
        self._pushes: dict[Machine, PushesTogether] = {}  # worker → the pushes that its newest push is one of
        spec = cluster.spec
        self._behind = [  # worker → the seconds by which returned slices are behind the pushed ones
            (spec.one_way(worker) + spec.apply_seconds) / spec.slices + cluster.message_seconds
            for worker in spec.workers
        ]

    def abandon(self, machine: Machine) -> None:
        super().abandon(machine)
        self._returns.pop(machine, None)
        pushes = self._pushes.pop(machine, None)
        if pushes and pushes.ended_at < 0:
            was_awaited = machine in pushes.waits_for
            pushes.remove(machine)
            if was_awaited:
                self._begin_returns(pushes)
            self._clock.at(self._clock.now, self._arrive, pushes)  # the job is still busy with the cancellation

    def granted(self, machine: Machine) -> None:
        """Let a granted worker compute once its slices are back, if they are the newest model."""
        returned = self._returns.get(machine)
        if returned == "coming":
            self._hand_over_newest(machine)
            self._returns[machine] = "awaited"
        elif returned == "complete" and self._pushes[machine].ended_at == self._clock.now:
            self._hand_over_newest(machine)
            self._after(self._behind[machine.number], machine, self._finish_return)  # the last slice is on the way
        else:
            self._returns.pop(machine, None)  # others have changed the model since
            super().granted(machine)

    def _hand_over_newest(self, machine: Machine) -> None:
        self._servers.catch_up(math.inf)
        if self._model:
            self._model.pull(machine.number, machine.expected)

    def stream(self, order: instructions.OrderStream) -> None:
        """Note which pushes are applied together."""
        machines = [self._cluster.machines[update.worker] for update in order.updates]
        pushes = PushesTogether(set(machines))
        for machine in machines:
            self._pushes[machine] = pushes
        for machine in machines:
            if self._returns.get(machine) == "coming":
                self._push_began(machine)

    def _send_gradient(self, machine: Machine) -> None:
        machine.transfer("in", self._update_bytes, self._push_ended)
        self._returns[machine] = "coming"
        self._push_began(machine)

    def _push_began(self, machine: Machine) -> None:
        pushes = self._pushes.get(machine)
        if pushes and machine in pushes.waits_for:
            pushes.waits_for.remove(machine)
            pushes.began.append(machine)
            self._begin_returns(pushes)

    def _begin_returns(self, pushes: PushesTogether) -> None:
        """Begin the returns if all pushes of a Stream have begun."""
        if not pushes.waits_for:
            for each in pushes.began:
                self._after(self._behind[each.number], each, self._begin_return)

    def _push_ended(self, machine: Machine) -> None:
        pushes = self._pushes[machine]
        pushes.ended.append(machine)
        if pushes.is_complete:
            self._arrive(pushes)
        else:
            self._cluster.update_held(machine)

    def _arrive(self, pushes: PushesTogether) -> None:
        """Report the updates of a Stream when all of them are at the servers."""
        if pushes.is_complete and pushes.ended_at < 0:
            pushes.ended_at = self._clock.now
            for machine in list(pushes.ended):
                if self._pushes.get(machine) is pushes:
                    self._cluster.update_arrived(machine)

    def _begin_return(self, machine: Machine) -> None:
        machine.transfer("out", self._reply_bytes, self._return_ended)

    def _return_ended(self, machine: Machine) -> None:
        if self._returns[machine] == "coming":
            self._returns[machine] = "complete"
        else:
            self._finish_return(machine)

    def _finish_return(self, machine: Machine) -> None:
        del self._returns[machine]
        self._cluster.model_arrived(machine)

    def apply(self, order: instructions.OrderApply) -> None:
        super().apply(order)
        self._servers.catch_up(self._clock.now)  # pulls are rare here, and finished decisions must not pile up

    def _after(self, seconds: float, machine: Machine, do: Callable[[Machine], None]) -> None:
        """Call `do(machine)` in `seconds`, unless the worker's iteration is abandoned before that."""
        resets = machine.resets

        def do_unless_abandoned(_: None) -> None:
            if machine.resets == resets and machine.up and machine.member:
                do(machine)

        self._clock.at(self._clock.now + seconds, do_unless_abandoned)
