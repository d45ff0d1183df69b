"""The batches of a job, epoch by epoch, for a library that owns the training loop.

`session.loader` begins a new epoch each time it is iterated over. A library also needs to know whether a batch is the
last one, where the job is when a worker joins late, and how to end training in all workers.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from paceline.train.backend import AssignedSamples, Backend
from paceline.train.data import EpochBatches, JobBatches
from paceline.train.optimizer import PacedOptimizer

ENDLESS = 1 << 30  # epochs, if the library does not know how many there will be
START_FILE = "paceline-job-start"  # in the folder of a library's checkpoints: where the newest job began


class JobEpochs:
    """A loader of this worker's batches. Each iteration over it yields those of one epoch of the job.

    An iteration that was left early is continued by the next one. An epoch of which this worker gets no samples, since
    it joined late or is slow, has no iteration. Other attributes are those of the DataLoader.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        batches: EpochBatches,
        optimizer: PacedOptimizer,
        backend: Backend,
        fetches_ahead: bool = False,
    ) -> None:
        """fetches_ahead: the library fetches batches before it trains on them, and calls `use` for each."""
        self.loader, self._batches, self._optimizer, self._backend = loader, batches, optimizer, backend
        self._fetches_ahead = fetches_ahead
        self._planned: float | None = None
        self._source: Iterator[tuple[AssignedSamples, Any]] | None = None
        self._ahead: deque[tuple[AssignedSamples, Any]] = deque()  # assigned, not yet fetched by the library
        self._fetched: deque[tuple[AssignedSamples, Any]] = deque()  # by the library, not yet trained on
        self.last: AssignedSamples | None = None  # trained on
        #: The epoch of the batch that was trained on last.
        self.epoch = 0
        self._next_epoch = 0  # the next iteration is of this epoch or a later one
        self._has_ended = False

    def plan(self, epochs: float | None, skipped: int = 0) -> None:
        """Train this number of epochs, or forever if it is None.

        skipped: the number of samples, over all epochs, that an earlier job has trained on.
        """
        self._planned = epochs
        if isinstance(self._batches, JobBatches):
            self._batches.skipped = skipped

    @property
    def size(self) -> int | None:
        """The number of samples in an epoch, or None if the job does not assign them."""
        return self._batches.size if isinstance(self._batches, JobBatches) else None

    def __len__(self) -> int:
        """Return the number of batches of an epoch for each process, if all of them are equally fast."""
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet, for example while the object is being copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        self._ahead.extendleft(reversed(self._fetched))
        self._fetched.clear()
        first = self.peek()
        if first is None:
            return
        # Samples of an earlier epoch, which a lost worker has left, are trained on in this one.
        self.epoch = self._next_epoch = max(self._next_epoch, self.epoch_of(first))
        while not self.is_over:
            self._fetched.append(self._ahead.popleft())
            batch = self._fetched[-1][1]
            if not self._fetches_ahead:
                self.use()
            yield batch

    def peek(self) -> AssignedSamples | None:
        """Return the samples of the next batch, or None if training is over."""
        if self._source is None:
            self._source = self._batches.assigned(self._epochs_left())
        while True:
            if not self._ahead:
                found = next(self._source, None)
                if found is None or self._is_beyond(found[0]):
                    return None
                self._ahead.append(found)
            if not self._is_void(self._ahead[0][0]):
                return self._ahead[0][0]
            self._ahead.popleft()

    def peek_fetched(self) -> AssignedSamples | None:
        """Return the samples of the batch that will be trained on next, which the library may have fetched already."""
        return self._fetched[0][0] if self._fetched else self.peek()

    @property
    def is_over(self) -> bool:
        """Whether no batch of this epoch is left."""
        following = self.peek()
        if following is not None and self.epoch_of(following) <= self.epoch:
            return False
        self._next_epoch = self.epoch + 1
        return True

    def use(self) -> bool:
        """Count the batch that was fetched first as part of the next gradient.

        Return False if the worker was given up meanwhile: then other workers train on these samples.
        """
        samples, _ = self._fetched.popleft()
        if self._is_void(samples):
            return False
        self.last = samples
        self._optimizer.trains_on(samples)
        return True

    def epoch_of(self, samples: AssignedSamples) -> int:
        """Return the epoch that these samples belong to."""
        return self._place(samples)[0]

    def steps_before(self, samples: AssignedSamples, steps: int, batches: int = 1) -> int:
        """Return the number of steps that equally fast workers make before they reach these samples.

        steps: in an epoch. batches: in a step of one process.
        """
        epoch, start = self._place(samples)
        unit = batches * (self.loader.batch_size or 1) * self._optimizer.world_size
        return epoch * steps + min(steps, start // unit)

    def steps_done(self, steps: int, batches: int = 1) -> int | None:
        """Return the same number, at the end of the step of the last batch. It is None if the job does not know."""
        if self.last is None or self.size is None:
            return None
        epoch, _ = self._place(self.last)
        return min((epoch + 1) * steps, self.steps_before(self.last, steps, batches) + 1)

    def end(self) -> None:
        """End training in all workers: the job hands out no samples from now on. Only the main worker's call counts."""
        is_known = self._has_ended or self._optimizer.finished or self._optimizer.closed
        if self.size is not None and not is_known and self.peek() is not None:
            self._has_ended = True
            self._backend.end_samples(self.size)

    def _place(self, samples: AssignedSamples) -> tuple[int, int]:
        """Return the epoch of these samples, and the number of samples before them in it."""
        if isinstance(self._batches, JobBatches):
            return divmod(self._batches.position(samples), self._batches.size)
        return samples.epoch, 0

    def _epochs_left(self) -> int:
        """Return the number of epochs that the job must have, begun ones included."""
        if self._planned is None:
            return ENDLESS
        if not isinstance(self._batches, JobBatches):
            return math.ceil(self._planned)
        return max(0, math.ceil(self._planned - self._batches.skipped / self._batches.size))

    def _is_beyond(self, samples: AssignedSamples) -> bool:
        """Return whether these samples come after the planned ones: a job has whole epochs, and a plan may not."""
        if self._planned is None or not isinstance(self._batches, JobBatches):
            return False
        return self._batches.position(samples) >= round(self._planned * self._batches.size)

    def _is_void(self, samples: AssignedSamples) -> bool:
        return samples.joins < self._backend.joins


def skipped_samples(folder: Path, position: int, has_trained: bool, is_main: bool) -> int:
    """Return the number of samples, over all epochs, that were trained on before this job began.

    position: that of the library's checkpoint from which this worker resumes. A new job begins there. A worker that
        joins a job that has trained reads where that job began, because newer checkpoints may have been written since.
    """
    file = folder / START_FILE
    if has_trained:
        return int(json.loads(file.read_text())["skipped"]) if file.exists() else 0
    if is_main and (position or file.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        part = file.with_name(file.name + ".part")
        part.write_text(json.dumps({"skipped": position}))
        part.replace(file)
    return position
