"""Batches of arrays in memory, made of the samples that the job assigns: each sample once an epoch, in all workers."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.arrays.tree import by_path, replaced


class ArrayData:
    """A tree of arrays with one row for each sample, such as (images, labels)."""

    def __init__(self, data: Any) -> None:
        self._data = replaced(data, lambda _, leaf: np.asarray(leaf))
        counts = {path: len(array) if array.ndim else 0 for path, array in by_path(self._data).items()}
        if not counts:
            raise ValueError("There is no data; pass an array, or a tuple of arrays such as (images, labels).")
        self.size = next(iter(counts.values()))
        for path, count in counts.items():
            if count != self.size:
                raise ValueError(
                    f"The arrays must have a row for each sample: {next(iter(counts))!r} has {self.size} rows, and "
                    f"{path!r} has {count}."
                )

    def some(self, numbers: npt.NDArray[np.int64]) -> Any:
        """Return these samples, in a tree like that of the data."""
        return replaced(self._data, lambda _, array: array[numbers])


def order_of(size: int, seed: int) -> Callable[[int], npt.NDArray[np.int64]]:
    """Return a function of the epoch that returns the order of the samples in it.

    All workers of a job need the same order. It is that of `torch.randperm`, so a torch worker has it too.
    """

    @lru_cache(maxsize=2)
    def order(epoch: int) -> npt.NDArray[np.int64]:
        # torch seeds the same Mersenne Twister with the lower 32 bits, and shuffles as Fisher and Yates do.
        random = np.random.RandomState((seed + epoch) & 0xFFFF_FFFF)
        drawn = random.randint(0, 1 << 32, size=max(0, size - 1), dtype=np.uint32).astype(np.int64)
        shuffled = list(range(size))
        for place, step in enumerate((drawn % (size - np.arange(len(drawn)))).tolist()):
            shuffled[place], shuffled[place + step] = shuffled[place + step], shuffled[place]
        return np.array(shuffled, np.int64)

    return order
