"""Batches as the job hands them out: each sample once an epoch over all workers, whoever comes and goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from paceline.train.backend import AssignedSamples, Backend
from paceline.train.optimizer import PacedOptimizer


class JobBatches:
    """A DataLoader's batches, but of those samples that this worker is given.

    Everything else about it stays: dataset, collate_fn, num_workers and so on. With num_workers, samples are taken
    ahead of time, as batches are. Each batch is counted when it is given to the loop, and not before.
    """

    def __init__(self, loader: DataLoader[Any], optimizer: PacedOptimizer, link: Backend, seed: int = 0) -> None:
        shuffle, seed = _order_of(loader, seed)
        assert loader.batch_size is not None
        count = len(loader.dataset)  # type: ignore[arg-type]
        unit = loader.batch_size * link.ranks
        if count < loader.batch_size:
            raise ValueError(f"The dataset has {count} samples, fewer than a batch of {loader.batch_size}.")
        self._optimizer, self._link = optimizer, link
        self._take, self._batch_size = link.source(), loader.batch_size
        self.size = max(unit, count - count % unit) if loader.drop_last else count
        if self.size > count:
            raise ValueError(f"The dataset has {count} samples, fewer than the {unit} that the ranks take at a time.")
        self.epochs = 0  # of how many epochs samples have been asked for
        self._ahead: deque[AssignedSamples] = deque()  # taken, and not yet given to the loop

        @lru_cache(maxsize=2)
        def order(epoch: int) -> torch.Tensor:
            """Alike for all workers, so it depends on nothing of this process."""
            if not shuffle:
                return torch.arange(count)
            return torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))

        self._order = order
        self._loader: DataLoader[Any] = DataLoader(
            loader.dataset, batch_sampler=_AssignedBatches(self), **_settings(loader)
        )

    def batches(self, epochs: int) -> Iterator[Any]:
        """The batches of the next so many epochs."""
        self.epochs += epochs
        while True:
            for batch in self._loader:
                share = self._ahead.popleft()
                if share.joins < self._link.joins:
                    continue  # The worker had been given up: others have these samples now.
                self._optimizer.trains_on(share)
                yield batch
            # Samples are taken ahead of time, and since the last were, some may have come back.
            again = self._take(self._batch_size, self.size, self.epochs)
            if again is None:
                return
            self._ahead.append(again)  # the loader begins with what is in there

    def indices(self) -> Iterator[list[int]]:
        """Samples' numbers, a batch at a time, taken from the job as they are asked for."""
        left = list(self._ahead)  # by a loop that was broken off
        self._ahead.clear()
        while share := left.pop(0) if left else self._take(self._batch_size, self.size, self.epochs):
            self._ahead.append(share)
            yield self._order(share.epoch)[share.start : share.stop].tolist()

    @property
    def pending(self) -> bool:
        """May a step still come, of batches that were accumulated?"""
        return self._optimizer.pending

    def __len__(self) -> int:
        return -(-self.size // self._batch_size)


class _AssignedBatches:
    """What torch calls a batch sampler."""

    def __init__(self, feed: JobBatches) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[list[int]]:
        return self._feed.indices()

    def __len__(self) -> int:
        return len(self._feed)


class PacedLoader:
    """A DataLoader that takes part in a job: each time it is iterated over, this worker's batches of one more epoch.

    `len()` counts the batches of an epoch over all workers. All else that is asked of it is asked of the DataLoader.
    """

    def __init__(
        self, loader: DataLoader[Any], feed: JobBatches, finish: Callable[[], None], epochs: int | None
    ) -> None:
        self._loader, self._feed, self._finish, self._epochs = loader, feed, finish, epochs

    def __iter__(self) -> Iterator[Any]:
        yield from self._feed.batches(1)
        if self._feed.epochs == self._epochs and not self._feed.pending:
            self._finish()

    def __len__(self) -> int:
        return len(self._feed)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)


def loader_of(data: Any, batch_size: int | None) -> DataLoader[Any]:
    """A DataLoader as it is, or one that shuffles a Dataset."""
    if isinstance(data, DataLoader):
        if batch_size not in (None, data.batch_size):
            raise ValueError("The DataLoader has a batch size already; leave batch_size out.")
        return data
    if isinstance(data, IterableDataset) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise ValueError(
            "Samples are handed out by their number; give a DataLoader, or a Dataset with __len__ and __getitem__."
        )
    if batch_size is None or batch_size < 1:
        raise ValueError("Say how large a batch is to be: batch_size must be a number from 1 up.")
    dataset: Dataset[Any] = data
    if len(data) < batch_size:
        raise ValueError(f"The dataset has {len(data)} samples, fewer than a batch of {batch_size}.")
    return DataLoader(dataset, batch_size, shuffle=True)


def _order_of(loader: DataLoader[Any], seed: int) -> tuple[bool, int]:
    """Does it shuffle, and by which seed? The loader's own generator is left out: it may differ between workers."""
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError("An IterableDataset cannot be shared out by sample; give a Dataset with __len__.")
    sampler = loader.sampler
    plain = type(loader.batch_sampler) is torch.utils.data.BatchSampler
    if plain and type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(loader.dataset):  # type: ignore[arg-type]
        return True, seed
    if plain and type(sampler) is SequentialSampler:
        return False, seed
    if plain and type(sampler) is DistributedSampler:
        return sampler.shuffle, sampler.seed
    raise ValueError(
        "The job hands out the samples, so the DataLoader must have a batch size and no sampler of its own; "
        "choose samples with torch.utils.data.Subset instead."
    )


def _settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """What else there is to a DataLoader."""
    names = (
        "num_workers",
        "collate_fn",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "generator",
        "persistent_workers",
        "prefetch_factor",
    )
    return {name: getattr(loader, name) for name in names}
