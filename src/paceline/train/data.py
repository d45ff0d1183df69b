"""Batches of the samples that the job assigns: all workers together see each sample once an epoch.

This holds while workers join and leave. Data that the job cannot assign is in `paceline.train.stream`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from paceline.train.backend import AssignedSamples, Backend
from paceline.train.optimizer import PacedOptimizer
from paceline.train.stream import StreamBatches, settings


class EpochBatches(Protocol):
    """This process's batches of the data, epoch by epoch."""

    epochs: int  # the number of epochs that have begun

    def plan(self, epochs: int) -> None:
        """Take note that this number of epochs will be trained in all."""

    def batches(self, epochs: int | None = None) -> Iterator[Any]:
        """Yield the batches of the next `epochs` epochs. None: of one epoch, and nobody knows whether more follow."""

    def assigned(self, epochs: int | None = None) -> Iterator[tuple[AssignedSamples, Any]]:
        """Yield the same batches, each with its samples. The caller must count them: `PacedOptimizer.trains_on`."""

    @property
    def pending(self) -> bool:
        """Whether gradients have been accumulated that no step has pushed yet."""

    def __len__(self) -> int:
        """Return the number of batches of an epoch for each process of the job."""


class JobBatches:
    """The batches of a DataLoader, made of the samples that the job assigns to this worker.

    The loader's other settings are kept: dataset, collate_fn, num_workers and so on. With num_workers, samples are
    requested ahead of time, because batches are fetched ahead of time. A batch counts as trained on only when the
    training loop receives it.
    """

    def __init__(self, loader: DataLoader[Any], optimizer: PacedOptimizer, backend: Backend, seed: int = 0) -> None:
        #: The number of samples, over all epochs, that an earlier job has trained on. This job continues behind them.
        self.skipped = 0
        shuffling = _shuffling(loader, seed)
        assert shuffling is not None and loader.batch_size is not None
        shuffle, seed = shuffling
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
        self._planned: int | None = None  # the number of epochs in all, if it is known
        self._ahead: deque[AssignedSamples] = deque()  # assigned, but not yet handed to the training loop

        @lru_cache(maxsize=2)
        def order(epoch: int) -> torch.Tensor:
            """Return the order of the samples in an epoch. It depends only on the seed: all workers need the same."""
            if not shuffle:
                return torch.arange(count)
            return torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))

        self._order = order
        self._loader: DataLoader[Any] = DataLoader(
            loader.dataset, batch_sampler=_AssignedBatches(self), **settings(loader)
        )

    def plan(self, epochs: int) -> None:
        """Take note that this number of epochs will be trained in all. The job shows its progress by it."""
        self._planned = epochs

    def batches(self, epochs: int | None = None) -> Iterator[Any]:
        """Yield this worker's batches of the next `epochs` epochs. None: of one epoch, and more may follow."""
        for samples, batch in self.assigned(epochs):
            self._optimizer.trains_on(samples)
            yield batch

    def assigned(self, epochs: int | None = None) -> Iterator[tuple[AssignedSamples, Any]]:
        """Yield the same batches, each with its samples. The caller must count them: `PacedOptimizer.trains_on`."""
        if epochs is not None and self.epochs == 0:
            self.plan(epochs)  # a later call continues, and so the plan was wrong: the job notices
        self.epochs += 1 if epochs is None else epochs
        while True:
            for batch in self._loader:
                samples = self._ahead.popleft()
                if samples.joins < self._backend.joins:
                    continue  # the worker was given up meanwhile, and others train on these samples
                yield samples, batch
            # The loader found no more samples, but it looks ahead: samples may have been returned to the job since.
            returned = self._request()
            if returned is None:
                return
            self._ahead.append(returned)  # `indices` begins with these

    def indices(self) -> Iterator[list[int]]:
        """Yield the sample numbers of one batch after another. Each batch is requested from the job when needed."""
        left = list(self._ahead)  # assigned, but not used because the training loop stopped early
        self._ahead.clear()
        while samples := left.pop(0) if left else self._request():
            self._ahead.append(samples)
            yield self._numbers(samples)

    def position(self, samples: AssignedSamples) -> int:
        """Return the number of samples that come before these, over all epochs."""
        return self.skipped + samples.epoch * self.size + samples.start

    def _numbers(self, samples: AssignedSamples) -> list[int]:
        """Return the numbers of these samples in the dataset."""
        numbers: list[int] = []
        left = samples.stop - samples.start
        while left:
            epoch, start = divmod(self.position(samples) + samples.stop - samples.start - left, self.size)
            count = min(left, self.size - start)
            numbers += self._order(epoch)[start : start + count].tolist()
            left -= count
        return numbers

    def _request(self) -> AssignedSamples | None:
        """Request the samples of one batch. Return None if the epochs that have begun have no more."""
        return self._take(self._batch_size, self.size, self.epochs, self._planned)

    @property
    def pending(self) -> bool:
        """Whether gradients have been accumulated that no step has pushed yet."""
        return self._optimizer.pending

    def __len__(self) -> int:
        """Return this process's share of an epoch's batches, if all workers are equally fast."""
        steps = -(-self.size // (self._batch_size * self._backend.ranks))  # the ranks of a worker step together
        return -(-steps // self._backend.workers)


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

    `len()` is this process's share of an epoch's batches. Every other attribute is that of the DataLoader.
    """

    def __init__(
        self, loader: DataLoader[Any], batches: EpochBatches, finish: Callable[[], None], epochs: int | None
    ) -> None:
        """finish: called after the last of `epochs` epochs."""
        self._loader, self._batches, self._finish, self._epochs = loader, batches, finish, epochs
        if epochs is not None:
            batches.plan(epochs)

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches.batches()
        if self._batches.epochs == self._epochs and not self._batches.pending:
            self._finish()

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not set yet, for example while the object is being copied
            raise AttributeError(name)
        return getattr(self._loader, name)


def batches_of(
    loader: DataLoader[Any], optimizer: PacedOptimizer, backend: Backend, seed: int, sharded: bool
) -> EpochBatches:
    """Return the batches of a loader: assigned by the job if it can number the samples, else a fixed part of them.

    sharded: the loader yields this process's part already.
    """
    if sharded or _shuffling(loader, seed) is None:
        return StreamBatches(loader, optimizer, backend, seed, sharded)
    return JobBatches(loader, optimizer, backend, seed)


def loader_of(data: Any, batch_size: int | None) -> DataLoader[Any]:
    """Return `data` if it is a DataLoader, or a DataLoader of a Dataset. It shuffles if the Dataset is not a stream."""
    if isinstance(data, DataLoader):
        if batch_size not in (None, data.batch_size):
            raise ValueError("The DataLoader already has a batch size; leave out batch_size.")
        return data
    is_stream = isinstance(data, IterableDataset)
    if not is_stream and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise ValueError("Pass a DataLoader, a Dataset with __len__ and __getitem__, or an IterableDataset.")
    if batch_size is None or batch_size < 1:
        raise ValueError(f"With a Dataset, batch_size must be a number of at least 1; got {batch_size}.")
    dataset: Dataset[Any] = data
    if is_stream:
        return DataLoader(dataset, batch_size)
    if len(data) < batch_size:
        raise ValueError(f"The dataset has {len(data)} samples, fewer than a batch of {batch_size}.")
    return DataLoader(dataset, batch_size, shuffle=True)


def _shuffling(loader: DataLoader[Any], seed: int) -> tuple[bool, int] | None:
    """Return whether the loader shuffles, and the seed; None if its samples are not simply all samples of a dataset.

    The loader's own generator is ignored: it may differ between workers.
    """
    sampler = loader.sampler
    if isinstance(loader.dataset, IterableDataset) or type(loader.batch_sampler) is not BatchSampler:
        return None
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(loader.dataset):  # type: ignore[arg-type]
        return True, seed
    if type(sampler) is SequentialSampler:
        return False, seed
    if type(sampler) is DistributedSampler:
        return sampler.shuffle, sampler.seed
    return None
