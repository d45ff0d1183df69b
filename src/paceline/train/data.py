"""Batches of the samples that the job assigns: all workers together see each sample once an epoch.

This holds while workers join and leave.
"""

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
    """The batches of a DataLoader, made of the samples that the job assigns to this worker.

    The loader's other settings are kept: dataset, collate_fn, num_workers and so on. With num_workers, samples are
    requested ahead of time, because batches are fetched ahead of time. A batch counts as trained on only when the
    training loop receives it.
    """

    def __init__(self, loader: DataLoader[Any], optimizer: PacedOptimizer, backend: Backend, seed: int = 0) -> None:
        shuffle, seed = _shuffling(loader, seed)
        assert loader.batch_size is not None
        count = len(loader.dataset)  # type: ignore[arg-type]
        unit = loader.batch_size * backend.ranks
        if count < loader.batch_size:
            raise ValueError(f"The dataset has {count} samples, fewer than a batch of {loader.batch_size}.")
        self._optimizer, self._backend = optimizer, backend
        self._take, self._batch_size = backend.sample_source(), loader.batch_size
        self.size = max(unit, count - count % unit) if loader.drop_last else count
        if self.size > count:
            raise ValueError(f"The dataset has {count} samples, fewer than the {unit} that the ranks use per step.")
        self.epochs = 0  # the number of epochs from which samples may be requested so far
        self._ahead: deque[AssignedSamples] = deque()  # assigned, but not yet handed to the training loop

        @lru_cache(maxsize=2)
        def order(epoch: int) -> torch.Tensor:
            """Return the order of the samples in an epoch. It depends only on the seed: all workers need the same."""
            if not shuffle:
                return torch.arange(count)
            return torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))

        self._order = order
        self._loader: DataLoader[Any] = DataLoader(
            loader.dataset, batch_sampler=_AssignedBatches(self), **_settings(loader)
        )

    def batches(self, epochs: int) -> Iterator[Any]:
        """Yield this worker's batches of the next `epochs` epochs."""
        self.epochs += epochs
        while True:
            for batch in self._loader:
                samples = self._ahead.popleft()
                if samples.joins < self._backend.joins:
                    continue  # the worker was given up meanwhile, and others train on these samples
                self._optimizer.trains_on(samples)
                yield batch
            # The loader found no more samples, but it looks ahead: samples may have been returned to the job since.
            returned = self._take(self._batch_size, self.size, self.epochs)
            if returned is None:
                return
            self._ahead.append(returned)  # `indices` begins with these

    def indices(self) -> Iterator[list[int]]:
        """Yield the sample numbers of one batch after another. Each batch is requested from the job when needed."""
        left = list(self._ahead)  # assigned, but not used because the training loop stopped early
        self._ahead.clear()
        while samples := left.pop(0) if left else self._take(self._batch_size, self.size, self.epochs):
            self._ahead.append(samples)
            yield self._order(samples.epoch)[samples.start : samples.stop].tolist()

    @property
    def pending(self) -> bool:
        """Whether gradients have been accumulated that no step has pushed yet."""
        return self._optimizer.pending

    def __len__(self) -> int:
        return -(-self.size // self._batch_size)


class _AssignedBatches:
    """A torch batch sampler that yields the samples of `JobBatches`."""

    def __init__(self, batches: JobBatches) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches.indices()

    def __len__(self) -> int:
        return len(self._batches)


class PacedLoader:
    """A DataLoader that takes part in a job. Each iteration over it yields this worker's batches of one more epoch.

    `len()` counts the batches of an epoch over all workers. Every other attribute is that of the DataLoader.
    """

    def __init__(
        self, loader: DataLoader[Any], batches: JobBatches, leave: Callable[[], None], epochs: int | None
    ) -> None:
        """leave: called after the last of `epochs` epochs."""
        self._loader, self._batches, self._leave, self._epochs = loader, batches, leave, epochs

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches.batches(1)
        if self._batches.epochs == self._epochs and not self._batches.pending:
            self._leave()

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not set yet, for example while the object is being copied
            raise AttributeError(name)
        return getattr(self._loader, name)


def loader_of(data: Any, batch_size: int | None) -> DataLoader[Any]:
    """Return `data` if it is a DataLoader, or a DataLoader that shuffles it if it is a Dataset."""
    if isinstance(data, DataLoader):
        if batch_size not in (None, data.batch_size):
            raise ValueError("The DataLoader already has a batch size; leave out batch_size.")
        return data
    if isinstance(data, IterableDataset) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise ValueError(
            "The job assigns samples by number; pass a DataLoader, or a Dataset with __len__ and __getitem__."
        )
    if batch_size is None or batch_size < 1:
        raise ValueError(f"With a Dataset, batch_size must be a number of at least 1; got {batch_size}.")
    dataset: Dataset[Any] = data
    if len(data) < batch_size:
        raise ValueError(f"The dataset has {len(data)} samples, fewer than a batch of {batch_size}.")
    return DataLoader(dataset, batch_size, shuffle=True)


def _shuffling(loader: DataLoader[Any], seed: int) -> tuple[bool, int]:
    """Return whether the loader shuffles, and the seed. Its own generator is ignored: it may differ between workers."""
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            "The job assigns samples by number, so it cannot use an IterableDataset; pass a Dataset with __len__."
        )
    sampler = loader.sampler
    plain = type(loader.batch_sampler) is torch.utils.data.BatchSampler
    if plain and type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(loader.dataset):  # type: ignore[arg-type]
        return True, seed
    if plain and type(sampler) is SequentialSampler:
        return False, seed
    if plain and type(sampler) is DistributedSampler:
        return sampler.shuffle, sampler.seed
    raise ValueError(
        "The job assigns the samples, so the DataLoader must have a batch size and no sampler of its own; "
        "select samples with torch.utils.data.Subset instead."
    )


def _settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the settings of the loader that are independent of which samples it loads."""
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
