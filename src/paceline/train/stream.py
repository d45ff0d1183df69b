"""Batches of data that the job cannot assign by number: streams, samplers of one's own, and data that is split already.

Each process takes a fixed part. Of a stream it takes every N-th sample, where N is the number of processes of the job;
of a sampler it takes every N-th batch. It begins with the number of its rank. So all processes together see each
sample once an epoch if the stream or the sampler has the same order in all of them. The part of a worker that is lost
is not taken over by others. A worker that is restarted begins its part again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from paceline.train.backend import AssignedSamples, Backend
from paceline.train.optimizer import PacedOptimizer

#: torch's samplers whose order depends on a generator.
RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class StreamBatches:
    """This process's part of the batches of a DataLoader."""

    def __init__(
        self, loader: DataLoader[Any], optimizer: PacedOptimizer, backend: Backend, seed: int = 0, sharded: bool = False
    ) -> None:
        """sharded: the loader yields this process's part already."""
        self._optimizer, self._backend, self._given, self._seed = optimizer, backend, loader, seed
        self._step = 1 if sharded else optimizer.world_size
        self._first = optimizer.rank % self._step
        self.epochs = 0  # that have begun
        self._last: Any = None  # the last batch, if there are several ranks
        # A subclass of DataLoader may build its batches in another way, so it is used as it is.
        self._is_plain = type(loader) is DataLoader
        self._loader = self._own_part(loader) if self._is_plain else loader
        self._unseeded = [] if sharded else _unseeded_samplers(loader)

    def _own_part(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader that loads only this process's part."""
        own = settings(loader)
        if loader.batch_sampler is not None:
            own["collate_fn"] = CountingCollate(loader.collate_fn)
        if isinstance(loader.dataset, IterableDataset):
            own["worker_init_fn"] = WorkerInitializer(loader.worker_init_fn)
            stream: IterableDataset[Any] = EveryNth(loader.dataset, self._first, self._step)
            return DataLoader(stream, loader.batch_size, drop_last=loader.drop_last, **own)
        if loader.batch_sampler is None:
            return DataLoader(loader.dataset, None, sampler=EveryNth(loader.sampler, self._first, self._step), **own)
        return DataLoader(loader.dataset, batch_sampler=EveryNth(loader.batch_sampler, self._first, self._step), **own)

    def plan(self, epochs: int) -> None:
        """Do nothing: the job does not count the samples of a stream."""

    def batches(self, epochs: int | None = None) -> Iterator[Any]:
        """Yield this process's batches of the next `epochs` epochs, or of one epoch if it is None."""
        for samples, batch in self.assigned(epochs):
            self._optimizer.trains_on(samples)
            yield batch

    def assigned(self, epochs: int | None = None) -> Iterator[tuple[AssignedSamples, Any]]:
        """Yield the same batches, each with its samples. The caller must count them: `PacedOptimizer.trains_on`."""
        for _ in range(1 if epochs is None else epochs):
            if epochs is not None and epochs > 1:
                self._set_epoch()  # otherwise the loop over the epochs is the script's, and may call set_epoch itself
            for sampler in self._unseeded:
                sampler.generator = torch.Generator().manual_seed(self._seed + self.epochs)
            self.epochs += 1
            source = self._counted_batches()
            while (found := self._next(source)) is not None:
                batch, size = found
                yield AssignedSamples(0, self._backend.joins, self.epochs - 1, 0, 0, size), batch

    def _set_epoch(self) -> None:
        """Tell the dataset and the samplers which epoch begins, if they have a method for it."""
        for part in (self._given.dataset, self._given.sampler, self._given.batch_sampler):
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self.epochs)

    def _counted_batches(self) -> Iterator[tuple[Any, int]]:
        """Yield this process's batches of one epoch, and the number of samples in each."""
        if isinstance(self._loader.collate_fn, CountingCollate):
            for size, batch in self._loader:
                yield batch, size
            return
        own = self._loader if self._is_plain else islice(self._loader, self._first, None, self._step)
        for batch in own:
            yield batch, size_of(batch, self._given.batch_size)

    def _next(self, source: Iterator[tuple[Any, int]]) -> tuple[Any, int] | None:
        """Return the next batch and its number of samples, or None if no rank of this worker has one.

        All ranks must make the same number of steps. So a rank whose part has ended repeats its last batch, which does
        not count.
        """
        found = next(source, None)
        if self._backend.ranks == 1:
            return found
        has_batch, can_step = found is not None, found is not None or self._last is not None
        having, able = self._backend.sum_over_ranks([float(has_batch), float(can_step)])
        if not having:
            return None
        if able < self._backend.ranks:
            raise ValueError(
                "A rank of this worker has no batch, and all ranks must make the same number of steps; "
                "the data must have at least one batch for each process."
            )
        if found is None:
            return self._last, 0
        self._last = found[0]
        return found

    @property
    def pending(self) -> bool:
        """Whether gradients have been accumulated that no step has pushed yet."""
        return self._optimizer.pending

    def __len__(self) -> int:
        """Return the number of batches of an epoch for each process. Raise TypeError if the data has no length."""
        given = self._given
        if not self._is_plain or not isinstance(given.dataset, IterableDataset):
            return -(-len(given) // self._step)
        dataset: Any = given.dataset
        samples, size = -(-len(dataset) // self._step), given.batch_size or 1
        return samples // size if given.drop_last else -(-samples // size)


class EveryNth(IterableDataset[Any]):
    """Every `step`-th element of an iterable, beginning with number `first`. It can be a dataset or a sampler."""

    def __init__(self, source: Iterable[Any], first: int, step: int) -> None:
        self.source, self._first, self._step = source, first, step

    def __iter__(self) -> Iterator[Any]:
        return islice(self.source, self._first, None, self._step)


class CountingCollate:
    """A collate_fn that returns the number of samples in a batch, and the batch."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> tuple[int, Any]:
        return len(samples), self._collate(samples)


class WorkerInitializer:
    """A worker_init_fn that gives the script its own dataset in `get_worker_info().dataset`."""

    def __init__(self, initialize: Callable[[int], None] | None) -> None:
        self._initialize = initialize

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        dataset = None if info is None else info.dataset
        if isinstance(dataset, EveryNth):
            object.__setattr__(info, "dataset", dataset.source)  # the attributes cannot be assigned to
        if self._initialize is not None:
            self._initialize(worker)


def size_of(batch: Any, most: int | None) -> int:
    """Return the number of samples in a batch: the length of the first tensor in it, and `most` at most.

    most: the batch size of the loader, if it has one. It also counts for a batch without a tensor.
    """
    sizes = [size for size in (_first_length(batch), most) if size is not None]
    return max(1, min(sizes, default=1))


def _first_length(value: Any) -> int | None:
    """Return the length of the first tensor in a tensor, a mapping or a sequence; None if there is none."""
    shape = getattr(value, "shape", None)
    if shape:
        return int(shape[0])
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return None
    return next((length for length in map(_first_length, value) if length is not None), None)


def settings(loader: DataLoader[Any]) -> dict[str, Any]:
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


def _unseeded_samplers(loader: DataLoader[Any]) -> list[Any]:
    """Return torch's random samplers in this loader that have no generator. Their order would differ everywhere."""
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    return [each for each in samplers if isinstance(each, RANDOM_SAMPLERS) and each.generator is None]
