"""The loaders that Lightning sees in place of the module's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from paceline.train.job_epochs import JobEpochs


class Unsized:
    """The batches of the job, without a length: Lightning then fetches one ahead, and so knows which is the last one.

    A length would also be a limit, and a worker may get more batches than its share.
    """

    def __init__(self, epochs: JobEpochs) -> None:
        self._epochs = epochs

    def __iter__(self) -> Iterator[Any]:
        return iter(self._epochs)

    def __getattr__(self, name: str) -> Any:
        if name == "_epochs":  # not set yet, for example while the object is being copied
            raise AttributeError(name)
        return getattr(self._epochs.loader, name)


class Sized:
    """A loader that only has a length: the batches of an epoch for each process."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def length_of(loader: DataLoader[Any], processes: int) -> Sized:
    """Return the length of a loader whose batches are divided among so many processes."""
    return Sized(-(-len(loader) // processes))
