"""Transfers in turn: where a policy paces its workers, the servers' links are not shared but handed on.

With K servers several transfers are in flight at once: each visits the servers one after the other, and the next
follows one server behind. So a transfer holds the gate for as long as it would take at the servers' full rate,
S/(K·B); then the next may begin, while the first still runs at the rate of its worker's own link. Each server sees the
same order and one transfer at a time, and no server stands idle while somebody waits. Members of one group's turn go
together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from paceline.simulate.clock import Clock

T = TypeVar("T")


class LinkGate(Generic[T]):
    """First come, first served, one direction."""

    def __init__(self, clock: Clock, holds: float, begin: Callable[[T], None]) -> None:
        self._clock = clock
        self._holds = holds  # seconds that one transfer holds the gate
        self._begin = begin
        self._queue: deque[tuple[int, T]] = deque()
        self._turn = -1  # whose turn the last one through was part of
        self._free_at = 0.0
        self._waking = False

    def enter(self, turn: int, who: T) -> None:
        """Begin now, or when those before have passed."""
        if turn == self._turn:
            self._free_at = max(self._free_at, self._clock.now) + self._holds
            self._begin(who)
        else:
            self._queue.append((turn, who))
            if not self._waking:
                self._next(None)

    def leave(self, who: T) -> None:
        """Who waits here waits no longer."""
        self._queue = deque(entry for entry in self._queue if entry[1] is not who)

    def _next(self, _: None) -> None:
        self._waking = False
        now = self._clock.now
        while self._queue:
            if now < self._free_at and self._queue[0][0] != self._turn:
                self._waking = True
                self._clock.at(self._free_at, self._next)
                return
            self._turn, who = self._queue.popleft()
            self._free_at = max(self._free_at, now) + self._holds
            self._begin(who)
