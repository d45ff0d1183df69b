"""Clipping: an update that is much larger than usual is scaled down, so that one worker cannot take the model over.

The size of an update is its Euclidean norm. The usual norm is the median over the workers of each worker's median over
its last updates. So a worker counts once, however often it pushes, and less than half of the workers cannot move the
usual norm far. With two workers the smaller one counts, because neither is a majority. A worker that is left alone is
also compared with what was usual when the others left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

REMEMBERED = 9  # updates of each worker whose sizes are known


class Size(NamedTuple):
    """The size of an update: three numbers, each of which is compared with its own usual value.

    Statistics, such as the running means of batch normalization, are values and not differences. An optimizer that
    divides by the size of the gradient, such as Adam, makes the learning rate a size of its own.
    """

    gradients: float  # their norm
    statistics: float  # their norm
    rate: float  # the largest learning rate


class Factors(NamedTuple):
    """The factors of an update: 1, or less if it was clipped."""

    weight: float = 1.0
    rate: float = 1.0  # of the learning rates


NOT_CLIPPED = Factors()


class Clipping:
    """Finds the factors that limit each update to `max_norm` times what is usual."""

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm
        self._sizes: dict[int, deque[Size]] = {}  # worker → the sizes of its last updates
        self._earlier: Size | None = None  # what was usual before the job was restored, or before a worker left

    def factors(self, worker: int, size: Size) -> Factors:
        """Return the factors of an update, and remember its size.

        The first update of a job is compared with nothing, so its factors are 1.
        """
        self._sizes.setdefault(worker, deque(maxlen=REMEMBERED)).append(size)
        gradients, statistics, rate = map(self._factor, size, self.usual())
        return Factors(min(gradients, statistics), rate)

    def usual(self) -> Size:
        """Return what is usual. While fewer than two workers are known, the earlier size counts too."""
        of_workers = [Size(*map(median_low, zip(*sizes, strict=True))) for sizes in self._sizes.values()]
        if self._earlier and len(of_workers) < 2:
            of_workers.append(self._earlier)
        return Size(*map(median_low, zip(*of_workers, strict=True)))

    def forget(self, worker: int) -> None:
        """Forget the sizes of a worker that has left, but not what was usual with it."""
        if worker in self._sizes:
            self._earlier = self.usual()
            del self._sizes[worker]

    def as_json(self) -> Sequence[float]:
        """Return what is usual, for a checkpoint. It is empty before the first update."""
        return list(self.usual() if self._sizes else self._earlier or ())

    def recall(self, usual: Sequence[float]) -> None:
        """Begin with what `as_json` returned."""
        self._earlier = Size(*usual) if usual else None

    def _factor(self, value: float, usual: float) -> float:
        limit = self.max_norm * usual
        return limit / value if value > limit > 0 else 1.0  # a usual value of 0 says nothing
