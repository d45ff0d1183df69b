"""A gate in front of the servers' links. Where a policy paces its workers, transfers pass it one after the other.

With K servers, several transfers are in flight at once: each visits the servers one after the other, and the next
transfer follows one server behind. A transfer holds the gate for as long as it would take at the full rate of all
servers, S/(K·B). Then the next one begins, while the first still runs at the rate of its worker's own link. So each
server sees the same order and one transfer at a time, and no server is idle while a transfer waits. The members of one
group's turn pass together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from paceline.simulate.clock import Clock

T = TypeVar("T")


class LinkGate(Generic[T]):
    """Admits transfers in one direction, first come, first served."""

    def __init__(self, clock: Clock, holds: float, begin: Callable[[T], None]) -> None:
        """holds: the seconds for which a transfer of the usual size holds the gate."""
        self._clock = clock
        self._holds = holds
        self._begin = begin
        self._queue: deque[tuple[int, T, float]] = deque()
        self._turn = -1  # the turn of the last transfer that has passed
        self._free_at = 0.0
        self._timer_set = False

    def enter(self, turn: int, transfer: T, holds: float | None = None) -> None:
        """Begin a transfer: now if its turn is passing or the gate is free, else after the transfers before it.

        holds: the seconds for which it holds the gate, if it is not of the usual size.
        """
        seconds = self._holds if holds is None else holds
        if turn == self._turn:
            self._free_at = max(self._free_at, self._clock.now) + seconds
            self._begin(transfer)
        else:
            self._queue.append((turn, transfer, seconds))
            if not self._timer_set:
                self._admit(None)

    def leave(self, transfer: T) -> None:
        """Remove a transfer from the queue, if it is there."""
        self._queue = deque(entry for entry in self._queue if entry[1] is not transfer)

    def _admit(self, _: None) -> None:
        """Begin the transfers whose time has come, and set a timer for the next."""
        self._timer_set = False
        now = self._clock.now
        while self._queue:
            if now < self._free_at and self._queue[0][0] != self._turn:
                self._timer_set = True
                self._clock.at(self._free_at, self._admit)
                return
            self._turn, transfer, seconds = self._queue.popleft()
            self._free_at = max(self._free_at, now) + seconds
            self._begin(transfer)
