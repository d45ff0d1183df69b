"""Virtual time: a heap of calls, ordered by time and sequence number, so calls at equal times keep their order."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """Runs scheduled calls in order of time."""

    __slots__ = ("_heap", "_sequence", "now", "pops", "running")

    def __init__(self) -> None:
        self.now = 0.0
        self.pops = 0  # calls taken off the heap
        self.running = True
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._sequence = 0

    def at(self, time: float, do: Callable[[Any], None], argument: Any = None) -> None:
        """Call `do(argument)` at this time."""
        self._sequence += 1
        heappush(self._heap, (time, self._sequence, do, argument))

    def run(self, most: int) -> bool:
        """Run up to `most` calls. Return False when none is left, or `running` was cleared."""
        heap, pop = self._heap, heappop
        left = most
        while heap and self.running and left:
            self.now, _, do, argument = pop(heap)
            left -= 1
            do(argument)
        self.pops += most - left
        return bool(heap) and self.running
