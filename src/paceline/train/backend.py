"""The job behind a session: it assigns samples, and exchanges gradients for new weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from paceline.serve.worker.client import Client
from paceline.serve.worker.streamed_exchange import Backward
from paceline.train.flat_model import FlatModel


@dataclass(frozen=True)
class AssignedSamples:
    """Samples to train on: positions `start` up to `stop` in the order of an epoch.

    number: identifies this assignment.
    joins: how often the worker had joined the job when it received them.
    size: how many of them count. It is 0 for a rank that has no samples and only keeps step with the others.
    """

    number: int
    joins: int
    epoch: int
    start: int
    stop: int
    size: int


#: Called with the batch size, the size of the dataset and the number of epochs. Returns the next samples, or None if
#: there are none left.
SampleSource: TypeAlias = Callable[[int, int, int], AssignedSamples | None]


@dataclass(frozen=True)
class ComputedGradient:
    """The properties of a gradient that the server needs to know."""

    batch_size: int
    rates: Sequence[float]  # the learning rate of each parameter group
    loss: float | None = None
    taken: Sequence[int] = ()  # numbers of the assignments that it was computed from
    scale: float = 1.0  # factor that the gradient is still multiplied by
    overflowed: bool = False  # whether it holds infinity or NaN and must be skipped


class Backend(Protocol):
    """A job, as one process of a worker sees it."""

    worker: int
    joins: int  # samples that were assigned before the last join belong to other workers now
    rank: int  # the number of this process within its worker
    ranks: int  # the number of processes of this worker

    @property
    def alone(self) -> bool:
        """Whether there is no server."""

    @property
    def mixes(self) -> bool:
        """Whether the server mixes models. A worker then steps its own optimizer and pushes weights."""

    @property
    def is_pushing(self) -> bool:
        """Whether a gradient is being pushed while the backward pass still computes it."""

    def describe_gradients_with(self, describe: Callable[[], ComputedGradient]) -> None:
        """Register the function that describes a gradient whose first part has just been computed."""

    def sample_source(self) -> SampleSource:
        """Return the function that assigns samples to this process."""

    def exchange(self, computed: ComputedGradient) -> bool:
        """Push the model's gradients and pull the newest weights.

        Return False if the gradients overflowed, in this rank or in another one. Then nothing was pushed.
        """

    def finish(self) -> None:
        """Wait until the other workers are done too, and pull the final model."""

    def report_metric(self, name: str, value: float) -> None:
        """Send a metric to the server."""

    def close(self) -> None:
        """Leave the job."""


class PushAfterBackward:
    """Base of the backends that push a gradient when all of it has been computed."""

    @property
    def is_pushing(self) -> bool:
        return False

    def describe_gradients_with(self, describe: Callable[[], ComputedGradient]) -> None:
        pass


class LocalBackend(PushAfterBackward):
    """No job: the same script under plain `python`."""

    worker = 0
    joins = 1
    rank = 0
    ranks = 1
    alone = True
    mixes = False

    def sample_source(self) -> SampleSource:
        """Return a function that assigns all samples of each epoch, in order."""
        number = epoch = position = 0

        def take(batch_size: int, size: int, epochs: int) -> AssignedSamples | None:
            nonlocal number, epoch, position
            if position >= size:
                epoch, position = epoch + 1, 0
            if epoch >= epochs:
                position = size  # stay at the end of the last epoch: a later call may allow more epochs
                epoch -= 1
                return None
            number, start, position = number + 1, position, min(size, position + batch_size)
            return AssignedSamples(number, 1, epoch, start, position, position - start)

        return take

    def exchange(self, computed: ComputedGradient) -> bool:
        raise AssertionError("a local backend has no server to exchange with")

    def finish(self) -> None:
        pass

    def report_metric(self, name: str, value: float) -> None:
        pass

    def close(self) -> None:
        pass


class JobBackend(PushAfterBackward):
    """A worker of a job that consists of one process."""

    rank = 0
    ranks = 1
    alone = False

    def __init__(self, client: Client, flat: FlatModel) -> None:
        self._client, self._flat = client, flat
        client.begin(flat.weights_bytes())
        flat.scatter()
        self.worker, self.joins = client.worker, client.joins
        self._pulled_at = time.perf_counter()

    def sample_source(self) -> SampleSource:
        def take(batch_size: int, size: int, epochs: int) -> AssignedSamples | None:
            samples = self._client.take(self._client.granted.batch_size or batch_size, size, epochs)
            if self.joins != self._client.joins:  # the worker was given up, joined again and pulled the newest weights
                self._flat.scatter()
                self.joins = self._client.joins
            if samples.start == samples.stop:
                return None
            count = samples.stop - samples.start
            return AssignedSamples(samples.number, self.joins, samples.epoch, samples.start, samples.stop, count)

        return take

    def exchange(self, computed: ComputedGradient) -> bool:
        if self._client.mixes:
            self._flat.gather_weights()
        else:
            self._flat.gather()
        self._exchange(computed)
        self._use_pulled_weights()
        return True

    def _exchange(self, computed: ComputedGradient, backward: Backward | None = None) -> None:
        exchange(self._client, self._flat, computed, self._pulled_at, backward)

    def _use_pulled_weights(self) -> None:
        self._flat.scatter()
        self.joins = self._client.joins
        self._pulled_at = time.perf_counter()

    @property
    def mixes(self) -> bool:
        return self._client.mixes

    def finish(self) -> None:
        while not self._client.finish(self._flat.weights_bytes()):
            pass  # the server restored a checkpoint; this script's loop is over, so other workers repeat the samples
        self._flat.scatter()

    def report_metric(self, name: str, value: float) -> None:
        self._client.measured(name, value)

    def close(self) -> None:
        self._client.close()


def exchange(
    client: Client, flat: FlatModel, computed: ComputedGradient, pulled_at: float, backward: Backward | None = None
) -> None:
    """Push the flat gradient and pull into the flat weights.

    pulled_at: when the last pull ended, as `time.perf_counter` counts. Computing began then.
    backward: the backward pass that still computes the gradient, if it is pushed meanwhile.
    """
    client.exchange(
        flat.gradient_bytes(),
        flat.weights_bytes(),
        batch_size=computed.batch_size,
        compute_seconds=time.perf_counter() - pulled_at,
        rates=computed.rates,
        loss=computed.loss,
        taken=computed.taken,
        dtype=flat.wire,
        backward=backward,
    )
