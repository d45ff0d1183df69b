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


class StreamedTransfer(WholeTransfer):
    """Returns what a worker pushes, one slice behind. A worker that has nothing to get back pulls the whole model."""

    def __init__(self, cluster: Cluster, in_turn: bool) -> None:
        super().__init__(cluster, in_turn)
        self._returns: dict[Machine, Return] = {}
        self._pushed_at: dict[Machine, float] = {}  # when the last push had arrived
        spec = cluster.spec
        self._behind = [  # worker → the seconds by which returned slices are behind the pushed ones
            (spec.one_way(worker) + spec.apply_seconds) / spec.slices + cluster.message_seconds
            for worker in spec.workers
        ]

    def abandon(self, machine: Machine) -> None:
        super().abandon(machine)
        self._returns.pop(machine, None)

    def granted(self, machine: Machine) -> None:
        """Let a granted worker compute once its slices are back, if they are the newest model."""
        returned = self._returns.get(machine)
        if returned == "coming":
            self._hand_over_newest(machine)
            self._returns[machine] = "awaited"
        elif returned == "complete" and self._pushed_at.get(machine) == self._clock.now:
            self._hand_over_newest(machine)
            self._after(self._behind[machine.number], machine, self._finish_return)  # the last slice is on the way
        else:
            self._returns.pop(machine, None)  # others have changed the model since
            super().granted(machine)

    def _hand_over_newest(self, machine: Machine) -> None:
        self._servers.catch_up(math.inf)
        if self._model:
            self._model.pull(machine.number, machine.expected)

    def _send_gradient(self, machine: Machine) -> None:
        machine.transfer("in", self._model_bytes, self._push_ended)
        self._returns[machine] = "coming"
        self._after(self._behind[machine.number], machine, self._begin_return)

    def _push_ended(self, machine: Machine) -> None:
        self._pushed_at[machine] = self._clock.now
        self._cluster.update_arrived(machine)

    def _begin_return(self, machine: Machine) -> None:
        machine.transfer("out", self._model_bytes, self._return_ended)

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
