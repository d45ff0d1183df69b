"""How much of the time the workers of a simulated cluster compute."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.observe.summary import Summary
from paceline.simulate.machine import NEVER, Machine


class ComputingTime:
    """Adds up how long each machine has computed since the warm-up. Computations that were abandoned do not count."""

    def __init__(self, machines: Sequence[Machine], summary: Summary) -> None:
        """summary: it knows when the warm-up is over."""
        self._machines, self._summary = machines, summary
        self._since = 0.0 if summary.warm_up == 0 else NEVER
        self._seconds = [0.0] * len(machines)

    def begin_after_warm_up(self, now: float) -> None:
        """Begin to count if the warm-up is over."""
        if self._since == NEVER and self._summary.arrivals >= self._summary.warm_up:
            self._since = now

    def add(self, machine: Machine, ended: float) -> None:
        """Count a computation that has ended at this time."""
        self._seconds[machine.number] += self._counted(machine, ended)

    @property
    def since(self) -> float:
        """The time at which the warm-up was over; 0 before that."""
        return max(0.0, self._since)

    def shares(self, now: float) -> tuple[float, ...]:
        """Return the share of the time since the warm-up in which each machine has computed; 0 before its end."""
        if self._since == NEVER or now <= self._since:
            return (0.0,) * len(self._machines)
        under_way = [0.0 if each.compute_ends == NEVER else self._counted(each, now) for each in self._machines]
        both = zip(self._seconds, under_way, strict=True)
        return tuple((before + last) / (now - self._since) for before, last in both)

    def _counted(self, machine: Machine, until: float) -> float:
        """Return the part of a machine's computation that is after the warm-up. A pause within it does not count."""
        if self._since == NEVER:
            return 0.0
        return max(0.0, min(until - max(machine.compute_began, self._since), machine.compute_seconds))
