"""Who trains on which samples: each sample once an epoch, whoever comes and goes.

Samples are handed out as ranges of positions in the epoch's order (which the workers shuffle alike). They are *done*
when the update computed from them has changed the model. Those of a cancelled iteration, of a discarded update, and of
one who left before its update arrived are handed out again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import NamedTuple


class Range(NamedTuple):
    """Positions from `start` up to `stop` of an epoch's order."""

    epoch: int
    start: int
    stop: int


class Samples:
    """The position in the data of a whole job."""

    def __init__(self, size: int, epochs: int) -> None:
        self.size, self.epochs = size, epochs
        self._epoch = self._position = 0
        self._returned: deque[Range] = deque()
        self._out: dict[int, list[Range]] = {}  # worker → what it was given for this iteration
        self._arrived: dict[Hashable, list[Range]] = {}  # update → what it was computed from

    def take(self, worker: int, count: int) -> Range | None:
        """The next `count` samples or fewer, all of one epoch; None when all have been handed out."""
        if self._returned:
            whole = self._returned.popleft()
            taken = whole._replace(stop=min(whole.stop, whole.start + count))
            if taken.stop < whole.stop:
                self._returned.appendleft(whole._replace(start=taken.stop))
        else:
            if self._position == self.size and self._epoch < self.epochs:
                self._epoch, self._position = self._epoch + 1, 0
            if self._epoch >= self.epochs or not self.size:
                return None
            taken = Range(self._epoch, self._position, min(self.size, self._position + count))
            self._position = taken.stop
        self._out.setdefault(worker, []).append(taken)
        return taken

    def arrived(self, worker: int, update: Hashable) -> None:
        """The worker's update is in."""
        self._arrived[update] = self._out.pop(worker, [])

    def done(self, update: Hashable) -> None:
        """The update has changed the model."""
        self._arrived.pop(update, None)

    def dropped(self, update: Hashable) -> None:
        """The update was discarded."""
        self._returned.extend(self._arrived.pop(update, []))

    def abandoned(self, worker: int) -> None:
        """The worker has left, or its iteration was cancelled, and no update will come."""
        self._returned.extend(self._out.pop(worker, []))

    @property
    def all_done(self) -> bool:
        """Has every sample of every epoch been trained on?"""
        handed_out = self._epoch >= self.epochs or (self._epoch == self.epochs - 1 and self._position == self.size)
        return handed_out and not any((self._returned, self._out, self._arrived))
