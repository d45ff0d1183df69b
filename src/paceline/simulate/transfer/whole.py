"""Whole transfers: an update counts once all of it has arrived, and a worker computes once it has the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.job import instructions
from paceline.simulate.machine import NEVER, Machine
from paceline.simulate.network import DIRECTIONS
from paceline.simulate.transfer.gate import LinkGate

if TYPE_CHECKING:
    from paceline.simulate.cluster import Cluster


class WholeTransfer:
    """Carries each gradient and each model as a whole. Streamed and pipelined transfers override some steps of this."""

    def __init__(self, cluster: Cluster, in_turn: bool) -> None:
        """in_turn: transfers pass a gate one after the other, instead of sharing the servers' links."""
        self._cluster, self._clock, self._servers = cluster, cluster.clock, cluster.servers
        self._ledger, self._model, self._observer = cluster.state.ledger, cluster.model, cluster.transfer_observer
        spec = cluster.spec
        self._model_bytes, self._update_bytes, self._reply_bytes = spec.model_bytes, spec.update_bytes, spec.reply_bytes
        self._apply_seconds = spec.apply_seconds
        self._replicas = spec.replicas
        self._push_gate: LinkGate[Machine] | None = None
        self._pull_gate: LinkGate[Machine] | None = None
        self.passes_together = True  # whether the transfers of one turn pass the gate together
        self._passed = 0
        self.pulls_saved = 0  # Grants to workers that had the newest model already
        if in_turn:
            occupies = cluster.network.occupies
            self._push_gate = LinkGate(cluster.clock, occupies(self._update_bytes, "in"), self._begin_push)
            self._pull_gate = LinkGate(cluster.clock, occupies(self._reply_bytes, "out"), self._begin_pull)
            self._first_pull_holds = occupies(self._model_bytes, "out")

    # Membership

    def enter_round(self, machine: Machine) -> None:
        """Count a granted worker in, whether or not its machine is up. Only pipelined transfers need this."""

    def abandon(self, machine: Machine) -> None:
        """Forget the iteration that a worker has under way."""
        if self._push_gate and self._pull_gate:
            self._push_gate.leave(machine)
            self._pull_gate.leave(machine)

    def leave(self, machine: Machine) -> None:
        """Forget a worker that is no longer a member."""

    # Pulls

    def granted(self, machine: Machine) -> None:
        """Bring the newest model to a granted worker, and let it compute."""
        if machine.version == self._ledger.version:
            self.pulls_saved += 1
            self._cluster.compute(machine)
            return
        now, busy = self._clock.now, self._servers.busy_until
        request_arrives = now + self._cluster.message_seconds
        machine.pull_at = request_arrives if request_arrives > busy else busy
        if machine.pull_at > now:
            self._clock.at(machine.pull_at, self._pull, machine)
        else:
            self._pull(machine)

    def _pull(self, machine: Machine) -> None:
        if machine.pull_at != self._clock.now:
            return  # the iteration was abandoned
        machine.pull_at = NEVER
        if self._pull_gate:
            holds = self._first_pull_holds if machine.version < 0 else None
            self._pull_gate.enter(self._turn(machine.granted_version), machine, holds)
        else:
            self._begin_pull(machine)

    def _begin_pull(self, machine: Machine) -> None:
        self._servers.catch_up(self._clock.now)
        version = self._servers.version
        if machine.expected is not None:  # so far counted from the version that was the newest at the Grant
            machine.expected -= version - machine.granted_version
        machine.granted_version = version
        if self._model:
            self._model.pull(machine.number, machine.expected)
        if self._observer:
            self._observer.pulling(self._clock.now, machine.number)
        # A worker that has a model gets the difference to it, encoded like an update.
        size = self._model_bytes if machine.version < 0 else self._reply_bytes
        machine.transfer("out", size, self._cluster.model_arrived)

    def _turn(self, version: int) -> int:
        """Return the turn of a transfer: that of the model's version, or one of its own."""
        self._passed += 1
        return version if self.passes_together else self._passed

    # Pushes

    def push(self, machine: Machine) -> None:
        """Carry the gradient of a worker to the servers."""
        if self._push_gate:
            self._push_gate.enter(self._turn(machine.base_version), machine)
        else:
            self._begin_push(machine)

    def _begin_push(self, machine: Machine) -> None:
        if self._observer:
            self._observer.pushing(self._clock.now, machine.number)
        self._send_gradient(machine)

    def _send_gradient(self, machine: Machine) -> None:
        if self._replicas:
            self._send_to_both(machine)
        else:
            machine.transfer("in", self._update_bytes, self._cluster.update_arrived)

    def _send_to_both(self, machine: Machine) -> None:
        """Carry a gradient to the servers, which pass it on to their backups while it arrives."""
        left = 2

        def arrived(machine: Machine) -> None:
            nonlocal left
            left -= 1
            if not left:
                self._cluster.update_arrived(machine)

        for direction in DIRECTIONS:  # in to the servers, and out of them to the backups
            machine.transfer(direction, self._update_bytes, arrived)

    def stream(self, order: instructions.OrderStream) -> None:
        """Note which pushes are applied together, slice by slice. Whole transfers need not know."""

    def apply(self, order: instructions.OrderApply) -> None:
        """Let the servers apply updates that have arrived, in one optimizer step."""
        self._servers.apply(self._servers.work(self._apply_seconds), order.version, order.decision)
