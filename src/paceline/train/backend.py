"""What a session asks of the job that it is part of: samples to train on, and weights for a gradient."""

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
    """Samples to train on: positions from `start` up to `stop` of an epoch's order.

    number, life: under which number they were given, and how often the worker had joined then.
    size: how many of them count. None do for a rank that only keeps step with the others.
    """

    number: int
    joins: int
    epoch: int
    start: int
    stop: int
    size: int


#: Given the batch size, the size of the dataset, and of how many epochs at most: the next samples, or None.
Source: TypeAlias = Callable[[int, int, int], AssignedSamples | None]


@dataclass(frozen=True)
class ComputedGradient:
    """What is told of a gradient."""

    batch_size: int
    rates: Sequence[float]
    loss: float | None = None
    taken: Sequence[int] = ()
    scale: float = 1.0  # that the gradients are still multiplied by
    overflowed: bool = False  # are they of no use?


class Backend(Protocol):
    """A job, as one process of a worker sees it."""

    worker: int
    joins: int  # what was taken in an earlier one is not this worker's any more
    rank: int  # which process of this worker
    ranks: int  # of so many

    @property
    def alone(self) -> bool:
        """Is there no server?"""

    @property
    def mixes(self) -> bool:
        """Does the server mix models? Then a worker makes its own steps, and pushes weights."""

    @property
    def pushing(self) -> bool:
        """Is a gradient under way that is still being computed?"""

    def watch(self, computing: Callable[[], ComputedGradient]) -> None:
        """computing: tells what is known of a gradient when the first of it is there."""

    def source(self) -> Source:
        """Where samples come from."""

    def exchange(self, computed: ComputedGradient) -> bool:
        """Give the model's gradients for the newest weights. False if they overflowed, here or in another rank."""

    def finish(self) -> None:
        """Wait until the other workers are done too, and have the last model."""

    def measured(self, kind: str, value: float) -> None:
        """Tell what was measured."""

    def close(self) -> None:
        """Leave."""


class AllAtOnce:
    """Gradients are pushed when they are all there."""

    @property
    def pushing(self) -> bool:
        return False

    def watch(self, computing: Callable[[], ComputedGradient]) -> None:
        pass


class LocalBackend(AllAtOnce):
    """No job at all: the same script under plain `python`."""

    worker = 0
    joins = 1
    rank = 0
    ranks = 1
    alone = True
    mixes = False

    def source(self) -> Source:
        """All samples, one after the other."""
        number = epoch = position = 0

        def take(batch_size: int, size: int, epochs: int) -> AssignedSamples | None:
            nonlocal number, epoch, position
            if position >= size:
                epoch, position = epoch + 1, 0
            if epoch >= epochs:
                position = size  # of the epoch before, should more be asked for
                epoch -= 1
                return None
            number, start, position = number + 1, position, min(size, position + batch_size)
            return AssignedSamples(number, 1, epoch, start, position, position - start)

        return take

    def exchange(self, computed: ComputedGradient) -> bool:
        raise AssertionError("there is nobody to exchange with")

    def finish(self) -> None:
        pass

    def measured(self, kind: str, value: float) -> None:
        pass

    def close(self) -> None:
        pass


class JobBackend(AllAtOnce):
    """One worker of a job, of one process."""

    rank = 0
    ranks = 1
    alone = False

    def __init__(self, client: Client, flat: FlatModel) -> None:
        self._client, self._flat = client, flat
        client.begin(flat.weights_bytes())
        flat.scatter()
        self.worker, self.joins = client.worker, client.joins
        self._since = time.perf_counter()

    def source(self) -> Source:
        def take(batch_size: int, size: int, epochs: int) -> AssignedSamples | None:
            given = self._client.take(self._client.granted.batch_size or batch_size, size, epochs)
            if self.joins != self._client.joins:  # It was given up, and has the newest weights of its new life.
                self._flat.scatter()
                self.joins = self._client.joins
            if given.start == given.stop:
                return None
            count = given.stop - given.start
            return AssignedSamples(given.number, self.joins, given.epoch, given.start, given.stop, count)

        return take

    def exchange(self, computed: ComputedGradient) -> bool:
        if self._client.mixes:
            self._flat.gather_weights()
        else:
            self._flat.gather()
        self._exchange(computed)
        self._take_over()
        return True

    def _exchange(self, computed: ComputedGradient, backward: Backward | None = None) -> None:
        exchange(self._client, self._flat, computed, self._since, backward)

    def _take_over(self) -> None:
        """What was pulled is the model."""
        self._flat.scatter()
        self.joins = self._client.joins
        self._since = time.perf_counter()

    @property
    def mixes(self) -> bool:
        return self._client.mixes

    def finish(self) -> None:
        while not self._client.finish(self._flat.weights_bytes()):
            pass  # the script's loop is over: what is to be done again is left to others
        self._flat.scatter()

    def measured(self, kind: str, value: float) -> None:
        self._client.measured(kind, value)

    def close(self) -> None:
        self._client.close()


def exchange(
    client: Client, flat: FlatModel, computed: ComputedGradient, since: float, backward: Backward | None = None
) -> None:
    """Push what is in the flat gradient, or will be when the backward pass is through; pull into the flat weights."""
    client.exchange(
        flat.gradient_bytes(),
        flat.weights_bytes(),
        batch_size=computed.batch_size,
        compute_seconds=time.perf_counter() - since,
        rates=computed.rates,
        loss=computed.loss,
        taken=computed.taken,
        dtype=flat.wire,
        backward=backward,
    )
