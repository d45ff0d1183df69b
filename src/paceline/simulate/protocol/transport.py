"""Connections that can be lost at any moment, and processes that can be stopped or killed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from paceline.simulate.clock import Clock


class SimulatedProcess:
    """A process: it does its work in order, except while it is stopped. Once killed, it does nothing."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.alive = True
        self._stopped_until = 0.0
        self._work: deque[Callable[[], None]] = deque()
        self._busy = False

    def do(self, work: Callable[[], None]) -> None:
        """Do this work now, or when the process continues."""
        if self.alive:
            self._work.append(work)
            self._continue(None)

    def after(self, seconds: float, work: Callable[[], None]) -> None:
        """Do this work in `seconds`, or when the process continues after that."""
        self.clock.at(self.clock.now + seconds, lambda _: self.do(work))

    def stop(self, seconds: float) -> None:
        """Stop the process for `seconds`. Work that arrives meanwhile waits."""
        self._stopped_until = max(self._stopped_until, self.clock.now + seconds)
        self.clock.at(self._stopped_until, self._continue)

    def kill(self) -> None:
        """End the process. Its work is lost."""
        self.alive = False
        self._work.clear()

    def _continue(self, _: None) -> None:
        if self._busy:
            return
        self._busy = True
        while self._work and self.alive and self.clock.now >= self._stopped_until:
            self._work.popleft()()
        self._busy = False


class ConnectionEnd(Protocol):
    """One end of a connection."""

    process: SimulatedProcess

    def received(self, connection: SimulatedConnection, message: Any) -> None:
        """Handle a message of the other end."""

    def lost(self, connection: SimulatedConnection) -> None:
        """Handle the loss of the connection."""


class SimulatedConnection:
    """A connection between a caller and a listener. Messages in one direction keep their order."""

    def __init__(
        self, number: int, caller: ConnectionEnd, listener: ConnectionEnd, rng: random.Random, slow: float = 0.02
    ) -> None:
        self.number, self.rng, self._slow = number, rng, slow
        self._ends = (caller, listener)
        self._arrives = {id(caller): 0.0, id(listener): 0.0}  # end → when the last message to it arrives
        self._open = {id(caller): True, id(listener): True}  # end → does it still use this connection?
        self._carries = True  # do messages sent from now on arrive?
        self._drops_all = False  # are messages on the way lost too?

    def send(self, sender: ConnectionEnd, message: Any) -> None:
        """Send a message to the other end. It arrives later, in order, unless the connection is lost before."""
        if not self._carries:
            return
        other = self._other(sender)
        clock = other.process.clock
        delay = self.rng.expovariate(1 / self._slow)
        at = self._arrives[id(other)] = max(self._arrives[id(other)], clock.now + delay)

        def arrive(_: None) -> None:
            if not self._drops_all and self._open[id(other)]:
                other.process.do(lambda: self._deliver(other, message))

        clock.at(at, arrive)

    def _deliver(self, end: ConnectionEnd, message: Any) -> None:
        if self._open[id(end)]:
            end.received(self, message)

    def cut(self, notice: float = 0.0) -> None:
        """Lose the connection. Messages on the way may still arrive. Each end notices within `notice` seconds."""
        if not self._carries:
            return
        self._carries = False
        self._drops_all = self.rng.random() < 0.5
        for end in self._ends:
            process = end.process
            seconds = max(self._arrives[id(end)] - process.clock.now, 0.0) + self.rng.uniform(0.0, notice)
            process.after(seconds, lambda end=end: self._notice(end))  # type: ignore[misc]

    def close(self, closer: ConnectionEnd) -> None:
        """Close the connection at one end. Its messages still arrive. The other end notices after that."""
        if self._open[id(closer)]:
            self._open[id(closer)] = False
            self._carries = False
            other = self._other(closer)
            process = other.process
            wait = max(self._arrives[id(other)] - process.clock.now, 0.0) + self.rng.expovariate(1 / self._slow)
            process.after(wait, lambda: self._notice(other))

    def _notice(self, end: ConnectionEnd) -> None:
        if self._open[id(end)]:
            self._open[id(end)] = False
            end.lost(self)

    def _other(self, end: ConnectionEnd) -> ConnectionEnd:
        return self._ends[1] if end is self._ends[0] else self._ends[0]
