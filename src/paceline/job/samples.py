"""Which worker trains on which samples. Each sample is trained on once an epoch, even when workers join and leave.

Samples are handed out as ranges of positions in the epoch's order, which all workers shuffle alike. A worker numbers
its requests. So it can request several ranges ahead of time, and report later which of them an update was computed
from. The samples of an update are *done* when the update has changed the model. The samples of a cancelled iteration,
of a discarded update, and of a worker that left before its update arrived are handed out again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple


class Positions(NamedTuple):
    """The positions from `start` up to `stop` in the order of one epoch."""

    epoch: int
    start: int
    stop: int


class Samples:
    """The samples of a job: handed out, arrived with an update, done, or returned."""

    def __init__(self, size: int, epochs: int) -> None:
        self.size, self.epochs = size, epochs
        self._planned = 0  # epochs that a worker has announced
        self.trained = 0  # samples that are done, over all epochs
        self._epoch = self._position = 0
        self._ended = False  # not saved: a resumed job trains on, and a main worker tells a restored server again
        self._returned: list[Positions] = []
        self._out: dict[int, dict[int, Positions]] = {}  # worker → request number → the range that it holds
        self._asked: dict[tuple[int, int], int] = {}  # worker, request number → how many samples were requested
        self._arrived: dict[Hashable, list[Positions]] = {}  # update → the ranges that it was computed from

    def plan(self, epochs: int | None) -> None:
        """Record how many epochs a worker will train in all, if it knows. Samples are not handed out because of it."""
        self._planned = max(self._planned, epochs or 0)

    def end(self) -> None:
        """Hand out no samples from now on: the main worker ends training early."""
        self._ended = True

    @property
    def total(self) -> int:
        """The samples of all planned epochs, or 0 if the job does not know how many epochs there will be."""
        return self.size * self._planned if self._planned >= self.epochs else 0

    def take(self, worker: int, number: int, count: int, epochs: int | None = None) -> Positions | None:
        """Hand out the next range of at most `count` samples of one epoch. Return None if no samples are left.

        A repeated request with the same number gets the same range.

        epochs: hand out samples of the first `epochs` epochs only. If that is more than the job knew of, the job gets
        longer: a script need not know in advance how many epochs it will train.
        """
        known = self._out.get(worker, {}).get(number)
        if known:
            return known
        if self._ended:
            return None
        epochs = self.epochs if epochs is None else epochs
        self.epochs = max(self.epochs, epochs)
        taken = self._take_returned(count, epochs) or self._take_new(count, epochs)
        if taken:
            self._out.setdefault(worker, {})[number] = taken
            self._asked[worker, number] = count
        return taken

    def _take_returned(self, count: int, epochs: int) -> Positions | None:
        """Take a range from the samples that were returned."""
        for index, whole in enumerate(self._returned):
            if whole.epoch < epochs:
                taken = whole._replace(stop=min(whole.stop, whole.start + count))
                if taken == whole:
                    del self._returned[index]
                else:
                    self._returned[index] = whole._replace(start=taken.stop)
                return taken
        return None

    def _take_new(self, count: int, epochs: int) -> Positions | None:
        """Take a range from the samples that were never handed out in this epoch."""
        if self._position == self.size and self._epoch + 1 < epochs:
            self._epoch, self._position = self._epoch + 1, 0
        if self._position == self.size or self._epoch >= epochs:
            return None
        taken = Positions(self._epoch, self._position, min(self.size, self._position + count))
        self._position = taken.stop
        return taken

    def held_by(self, worker: int) -> int:
        """Return the number of ranges that a worker holds."""
        return len(self._out.get(worker, ()))

    def given(self, worker: int, numbers: Iterable[int] | None = None) -> int:
        """Return how many samples a worker holds, under these numbers or in all."""
        mine = self._out.get(worker)
        if not mine:
            return 0
        ranges = mine.values() if numbers is None else [mine[number] for number in set(numbers) if number in mine]
        return sum(each.stop - each.start for each in ranges)

    def asked(self, worker: int, numbers: Iterable[int]) -> int:
        """Return how many samples a worker requested under these numbers. At the end of an epoch it got fewer."""
        return sum(self._asked.get((worker, number), 0) for number in set(numbers))

    def arrived(self, worker: int, numbers: Iterable[int], update: Hashable) -> None:
        """Record that an update has arrived that was computed from the ranges of these requests."""
        self._arrived[update] = self._claim(worker, numbers)

    def done(self, update: Hashable) -> None:
        """Record that an update has changed the model: its samples are done."""
        self.trained += sum(each.stop - each.start for each in self._arrived.pop(update, []))

    def dropped(self, update: Hashable) -> None:
        """Take back the samples of an update that was discarded."""
        self._returned.extend(self._arrived.pop(update, []))

    def returned(self, worker: int, numbers: Iterable[int]) -> None:
        """Take back the ranges of these requests: the worker's iteration was cancelled."""
        self._returned.extend(self._claim(worker, numbers))

    def abandoned(self, worker: int) -> None:
        """Take back all ranges that a worker still holds: it has left."""
        ranges = self._out.pop(worker, {})
        for number in ranges:
            del self._asked[worker, number]
        self._returned.extend(ranges.values())

    @property
    def all_done(self) -> bool:
        """True if every sample of every epoch, begun or planned, has been trained on."""
        return self.trained == self.size * max(self.epochs, self._planned)

    def as_json(self) -> dict[str, Any]:
        """Return the state as JSON values. Samples that are handed out and not done are saved as returned ones."""
        open_ranges = [*self._returned]
        for ranges in self._out.values():
            open_ranges.extend(ranges.values())
        for waiting in self._arrived.values():
            open_ranges.extend(waiting)
        return {
            "size": self.size,
            "epochs": self.epochs,
            "planned": self._planned,
            "epoch": self._epoch,
            "position": self._position,
            "trained": self.trained,
            "open": sorted(open_ranges),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Samples:
        """Restore the state that `as_json` returned."""
        samples = cls(value["size"], value["epochs"])
        samples.plan(value.get("planned"))
        samples.trained, samples._epoch, samples._position = value["trained"], value["epoch"], value["position"]
        samples._returned.extend(Positions(*each) for each in value["open"])
        return samples

    def _claim(self, worker: int, numbers: Iterable[int]) -> list[Positions]:
        """Remove and return the ranges that a worker holds under these numbers. Other numbers are ignored."""
        mine = self._out.get(worker, {})
        claimed = [number for number in dict.fromkeys(numbers) if number in mine]
        for number in claimed:
            del self._asked[worker, number]
        return [mine.pop(number) for number in claimed]
