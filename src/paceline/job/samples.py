"""Who trains on which samples: each sample once an epoch, whoever comes and goes.

Samples are handed out as ranges of positions in the epoch's order (which the workers shuffle alike). Each range that a
worker gets has a number, so that it can take several ahead of time and say later which of them an update was computed
from. Samples are *done* when that update has changed the model. Those of a cancelled iteration, of a discarded update,
and of one who left before its update arrived are handed out again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple


class Positions(NamedTuple):
    """Positions from `start` up to `stop` of an epoch's order."""

    epoch: int
    start: int
    stop: int


class Samples:
    """The position in the data of a whole job."""

    def __init__(self, size: int, epochs: int) -> None:
        self.size, self.epochs = size, epochs
        self.trained = 0  # samples that are done, over all epochs
        self._epoch = self._position = 0
        self._returned: list[Positions] = []
        self._out: dict[int, dict[int, Positions]] = {}  # worker → what it was given, by number
        self._arrived: dict[Hashable, list[Positions]] = {}  # update → what it was computed from

    def take(self, worker: int, number: int, count: int, epochs: int | None = None) -> Positions | None:
        """The next `count` samples or fewer, all of one epoch; None when all have been handed out.

        Asked again for the same number, it gives the same range. epochs: only of the first so many. If they are more
        than were known of, there are more from now on: a script need not know beforehand how long it will train.
        """
        known = self._out.get(worker, {}).get(number)
        if known:
            return known
        epochs = self.epochs if epochs is None else epochs
        self.epochs = max(self.epochs, epochs)
        taken = self._again(count, epochs) or self._next(count, epochs)
        if taken:
            self._out.setdefault(worker, {})[number] = taken
        return taken

    def _again(self, count: int, epochs: int) -> Positions | None:
        """Some that came back."""
        for index, whole in enumerate(self._returned):
            if whole.epoch < epochs:
                taken = whole._replace(stop=min(whole.stop, whole.start + count))
                if taken == whole:
                    del self._returned[index]
                else:
                    self._returned[index] = whole._replace(start=taken.stop)
                return taken
        return None

    def _next(self, count: int, epochs: int) -> Positions | None:
        """Some that nobody has had."""
        if self._position == self.size and self._epoch + 1 < epochs:
            self._epoch, self._position = self._epoch + 1, 0
        if self._position == self.size or self._epoch >= epochs:
            return None
        taken = Positions(self._epoch, self._position, min(self.size, self._position + count))
        self._position = taken.stop
        return taken

    def held_by(self, worker: int) -> int:
        """How many ranges it has."""
        return len(self._out.get(worker, ()))

    def arrived(self, worker: int, numbers: Iterable[int], update: Hashable) -> None:
        """The worker's update, computed from these ranges, is in."""
        self._arrived[update] = self._claim(worker, numbers)

    def done(self, update: Hashable) -> None:
        """The update has changed the model."""
        self.trained += sum(each.stop - each.start for each in self._arrived.pop(update, []))

    def dropped(self, update: Hashable) -> None:
        """The update was discarded."""
        self._returned.extend(self._arrived.pop(update, []))

    def returned(self, worker: int, numbers: Iterable[int]) -> None:
        """The worker's iteration was cancelled: of these no update will come."""
        self._returned.extend(self._claim(worker, numbers))

    def abandoned(self, worker: int) -> None:
        """The worker has left, and no update will come of what it still had."""
        self._returned.extend(self._out.pop(worker, {}).values())

    @property
    def all_done(self) -> bool:
        """Has every sample of every epoch been trained on?"""
        return self.trained == self.size * self.epochs

    def as_json(self) -> dict[str, Any]:
        """The position; whatever is not done counts as not handed out."""
        open_ranges = [*self._returned]
        for ranges in self._out.values():
            open_ranges.extend(ranges.values())
        for waiting in self._arrived.values():
            open_ranges.extend(waiting)
        return {
            "size": self.size,
            "epochs": self.epochs,
            "epoch": self._epoch,
            "position": self._position,
            "trained": self.trained,
            "open": sorted(open_ranges),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Samples:
        """Go on where `as_json` was."""
        samples = cls(value["size"], value["epochs"])
        samples.trained, samples._epoch, samples._position = value["trained"], value["epoch"], value["position"]
        samples._returned.extend(Positions(*each) for each in value["open"])
        return samples

    def _claim(self, worker: int, numbers: Iterable[int]) -> list[Positions]:
        """What it was given under these numbers; ones that are not its own count for nothing."""
        mine = self._out.get(worker, {})
        return [mine.pop(number) for number in numbers if number in mine]
