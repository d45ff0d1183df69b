"""Ray Datasets for the workers of a job.

`ray.train.get_dataset_shard` gives each worker a stream of its own, and all streams begin an epoch together. That would
be a barrier beside the policy's, and a lost worker would take its part of the data with it. Here every worker sees all
rows by number. The job assigns the rows, so that each counts once an epoch, whichever workers are lost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import ray

BLOCKS_AT_HAND = 16  # blocks that a worker keeps as arrays; Ray's object store holds the others

_provided: dict[str, BlockDataset] = {}


class BlockDataset:
    """The rows of a Ray Dataset as a torch Dataset. A row is a dict, and a batch of a DataLoader is one of tensors."""

    def __init__(self, blocks: Sequence[Any], rows: Sequence[int]) -> None:
        """blocks: references to the blocks, in order. rows: the number of rows of each."""
        self._blocks, self._ends = list(blocks), list(accumulate(rows))

    @classmethod
    def of(cls, data: Any) -> BlockDataset:
        """Return the rows of a Ray Dataset. Its blocks are computed once, and stay in Ray's object store."""
        entries = [
            (entry.ref, entry.metadata.num_rows)
            for bundle in data.materialize().iter_internal_ref_bundles()
            for entry in bundle.blocks
        ]
        return cls([ref for ref, _ in entries], [rows or 0 for _, rows in entries])

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        block = bisect_right(self._ends, index)
        first = self._ends[block - 1] if block else 0
        return {name: column[index - first] for name, column in _arrays(self._blocks[block]).items()}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several rows. A DataLoader calls this for a batch."""
        return [self[index] for index in indices]


@lru_cache(maxsize=BLOCKS_AT_HAND)
def _arrays(reference: Any) -> dict[str, Any]:
    """Return the columns of a block as arrays."""
    from ray.data.block import BlockAccessor

    columns = BlockAccessor.for_block(ray.get(reference)).to_numpy()
    return dict(columns)


def provide(datasets: Mapping[str, BlockDataset]) -> None:
    """Let `get_dataset_shard` return these datasets in this process."""
    _provided.clear()
    _provided.update(datasets)


def get_dataset_shard(name: str = "train") -> BlockDataset:
    """Return a dataset that was given to `PacelineTrainer(datasets=…)`, for `session.batches` and `session.loader`.

    All workers get the same rows, and the job divides them: each row counts once an epoch.
    """
    if name not in _provided:
        known = ", ".join(map(repr, _provided)) or "none"
        raise ValueError(f"There is no dataset {name!r}: give it to PacelineTrainer(datasets=…), which has {known}.")
    return _provided[name]
