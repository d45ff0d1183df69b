"""Faults of simulated machines: they are killed, paused or cut off, their leases expire, and they come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.job import events
from paceline.observe.driver import Fault
from paceline.simulate.machine import NEVER, Machine

if TYPE_CHECKING:
    from paceline.simulate.cluster import Cluster


class FaultInjector:
    """Breaks the machines of a cluster as its description says, and lets them recover."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._clock, self._lease = cluster, cluster.clock, cluster.spec.lease

    def schedule(self, faults: Sequence[Fault]) -> None:
        """Let each fault happen at its time."""
        for fault in faults:
            self._clock.at(fault.time, self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        machine = self._cluster.machines[fault.worker]
        if fault.kind == "rejoin":
            self._rejoin(machine)
        elif machine.up:
            self._fall_silent(machine)
            if fault.kind == "kill":
                self._cluster.abandon(machine)
                machine.up = False
                self._clock.at(machine.silent_since + self._lease, self._check_leases)
            else:
                until = self._clock.now + fault.seconds
                if fault.kind == "pause":
                    self._pause(machine, until)
                else:
                    machine.cut_until = max(machine.cut_until, until)
                    machine.halt_transfers()
                if until > machine.silent_since + self._lease:
                    self._clock.at(machine.silent_since + self._lease, self._check_leases)
                self._clock.at(until, self._recover, (machine, machine.incarnation))

    def _pause(self, machine: Machine, until: float) -> None:
        longer = until - max(machine.paused_until, self._clock.now)  # a pause within a pause adds nothing
        machine.paused_until = max(machine.paused_until, until)
        if longer > 0 and machine.compute_ends != NEVER:
            self._cluster.compute_until(machine, machine.compute_ends + longer)

    def _recover(self, paused: tuple[Machine, int]) -> None:
        """End a pause or a cut of an incarnation, unless another one lasts longer."""
        machine, incarnation = paused
        if machine.incarnation != incarnation or not machine.up:
            return
        now = self._clock.now
        if not machine.member:
            if now >= max(machine.paused_until, machine.cut_until):
                self._rejoin(machine)
        elif now >= machine.cut_until:
            machine.resume_transfers()
            if machine.unannounced and now >= machine.paused_until:
                machine.unannounced = False
                self._cluster.announce_gradient(machine)

    def _rejoin(self, machine: Machine) -> None:
        """Start a new incarnation of a worker that is down or was given up."""
        if machine.up and machine.member:
            return
        if machine.member:
            self._cluster.part_with(machine)
            self._cluster.tell(events.ConnectionLost(machine.connection))
        machine.paused_until = machine.cut_until = 0.0
        self._cluster.join(machine)

    # Leases

    def _fall_silent(self, machine: Machine) -> None:
        """Let the job hear the last heartbeat of a machine."""
        if not machine.is_silent:
            machine.silent_since = self._clock.now
            if machine.member:
                self._cluster.tell(events.WorkerAlive(machine.connection))

    def _check_leases(self, _: None) -> None:
        """Let the job find the leases that have expired. Machines that are not silent send a heartbeat first."""
        for machine in self._cluster.machines:
            if machine.member and not machine.is_silent:
                self._cluster.tell(events.WorkerAlive(machine.connection))
        self._cluster.tell(events.TimePassed(self._clock.now))
