"""The job behind a session: it assigns samples, and exchanges gradients for new weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from paceline.serve.worker.client import Client
from paceline.serve.worker.gradient import Backward
from paceline.serve.worker.samples_alone import SamplesAlone
from paceline.train.flat_model import FlatModel
from paceline.train.loading import Loading


@dataclass(frozen=True)
class AssignedSamples:
    """Samples to train on: positions `start` up to `stop` in the order of an epoch.

    number: identifies this assignment; 0 if the samples do not come from the job.
    joins: how often the worker had joined the job when it received them.
    size: how many of them count. It is 0 for a rank that has no samples and only keeps step with the others.
    """

    number: int
    joins: int
    epoch: int
    start: int
    stop: int
    size: int


#: Called with the batch size, the size of the dataset, the number of epochs that have begun, and the number of epochs
#: that are planned, if it is known. Returns the next samples, or None if the epochs that have begun have none left.
SampleSource: TypeAlias = Callable[[int, int, int, int | None], AssignedSamples | None]


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
    workers: int  # the number of workers that the job starts with
    has_trained: bool  # whether the job had trained before this process joined it
    knows_its_part: bool  # whether the script takes its data from the session, or has asked for its rank

    @property
    def alone(self) -> bool:
        """Whether there is no server."""

    @property
    def mixes(self) -> bool:
        """Whether the server mixes models. A worker then steps its own optimizer and pushes weights."""

    @property
    def steps_here(self) -> bool:
        """Whether the worker steps its own optimizer. Otherwise the server does, and has the optimizer's state."""

    @property
    def granted_batch(self) -> int | None:
        """The number of samples that the policy wants in this process's next gradient; None: the script's own."""

    @property
    def is_pushing(self) -> bool:
        """Whether a gradient is being pushed while the backward pass still computes it."""

    def describe_gradients_with(self, describe: Callable[[], ComputedGradient]) -> None:
        """Register the function that describes a gradient whose first part has just been computed."""

    def sample_source(self) -> SampleSource:
        """Return the function that assigns samples to this process."""

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Return the sums of a few numbers over the ranks of this worker. All of them must call this together."""

    def end_samples(self, size: int) -> None:
        """Let the job hand out no more samples of a dataset of this size, so that all workers end their loops.

        Only the call of the main worker counts.
        """

    def exchange(self, computed: ComputedGradient) -> bool:
        """Push the model's gradients and pull the newest weights.

        Return False if the gradients overflowed, in this rank or in another one. Then nothing was pushed.
        """

    def load_weights(self) -> None:
        """Give the job the weights that the model of the main worker holds. Other workers pull them when they train."""

    def load_optimizer_state(self) -> None:
        """Give the job the state that was loaded into the script's optimizer, before the next step."""

    def optimizer_state(self) -> dict[int, Any] | None:
        """Return the server's state of the optimizer, as in torch's state_dict; None if this process cannot get it."""

    def finish(self) -> None:
        """Wait until the other workers are done too, and pull the final model."""

    def report_metric(self, name: str, value: float) -> None:
        """Send a metric to the server."""

    def close(self) -> None:
        """Leave the job."""


class PushAfterBackward:
    """Base of the backends that push a gradient when all of it has been computed."""

    knows_its_part = False

    @property
    def is_pushing(self) -> bool:
        return False

    def describe_gradients_with(self, describe: Callable[[], ComputedGradient]) -> None:
        pass

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        return values


class LocalBackend(PushAfterBackward):
    """No job: the same script under plain `python`."""

    worker = 0
    joins = 1
    rank = 0
    ranks = 1
    workers = 1
    has_trained = False
    alone = True
    mixes = False
    steps_here = True
    granted_batch = None

    def sample_source(self) -> SampleSource:
        """Return a function that assigns all samples of each epoch, in order."""
        source = SamplesAlone()

        def take(batch_size: int, size: int, epochs: int, planned: int | None) -> AssignedSamples | None:
            samples = source.take(batch_size, size, epochs)
            count = samples.stop - samples.start
            return (
                AssignedSamples(samples.number, 1, samples.epoch, samples.start, samples.stop, count) if count else None
            )

        return take

    def end_samples(self, size: int) -> None:
        pass

    def exchange(self, computed: ComputedGradient) -> bool:
        raise AssertionError("a local backend has no server to exchange with")

    def load_weights(self) -> None:
        pass

    def load_optimizer_state(self) -> None:
        pass

    def optimizer_state(self) -> dict[int, Any] | None:
        return None

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

    def __init__(self, client: Client, flat: FlatModel, loading: Loading) -> None:
        self._client, self._flat, self._loading = client, flat, loading
        loading.begin(client)
        flat.scatter()
        loading.pulled()
        self.worker, self.joins, self.workers = client.worker, client.joins, client.workers
        self.has_trained = client.version > 0
        self._pulled_at = time.perf_counter()

    def sample_source(self) -> SampleSource:
        def take(batch_size: int, size: int, epochs: int, planned: int | None) -> AssignedSamples | None:
            if self._may_have_loaded() and self._loading.found_early():
                self._offer_weights()
            samples = self._client.take(self.granted_batch or batch_size, size, epochs, planned)
            self._notice_rejoin()
            if samples.start == samples.stop:
                return None
            count = samples.stop - samples.start
            return AssignedSamples(samples.number, self.joins, samples.epoch, samples.start, samples.stop, count)

        return take

    def _may_have_loaded(self) -> bool:
        """Return whether a model that differs from the pulled one was loaded by the script."""
        return not self._client.mixes

    def end_samples(self, size: int) -> None:
        self._client.end_samples(size)
        self._notice_rejoin()

    def exchange(self, computed: ComputedGradient) -> bool:
        if self._client.mixes:
            self._flat.gather_weights()
        elif self._loading.found() and (not self._offer_weights() or computed.taken):
            return False  # the samples of this gradient belong to other workers now, or it is of another model
        else:
            self._flat.gather()
        self._exchange(computed)
        self._use_pulled_weights()
        return True

    def _offer_weights(self) -> bool:
        """Offer weights that were loaded here to the job, and pull. Return whether the parameters stay the same."""
        before = self._loading.parameters_now()
        self._loading.offer(self._client)
        self._use_pulled_weights(after_step=False)
        return self._loading.is_followed(before)

    def _notice_rejoin(self) -> None:
        """Use the pulled weights if the worker was given up, joined again and pulled the newest ones."""
        if self.joins != self._client.joins:
            self._use_pulled_weights(after_step=False)

    def _exchange(self, computed: ComputedGradient, backward: Backward | None = None) -> None:
        exchange(self._client, self._flat, computed, self._pulled_at, backward)

    def _use_pulled_weights(self, after_step: bool = True) -> None:
        self._flat.scatter()
        self._loading.pulled()
        self._loading.has_stepped |= after_step
        self.joins = self._client.joins
        self._pulled_at = time.perf_counter()

    @property
    def granted_batch(self) -> int | None:
        return self._client.granted.batch_size

    @property
    def mixes(self) -> bool:
        return self._client.mixes

    @property
    def steps_here(self) -> bool:
        return self.mixes

    def load_weights(self) -> None:
        if self.worker == 0 and not self._client.mixes:
            self._loading.load_weights(self._client)
            self._use_pulled_weights(after_step=False)

    def load_optimizer_state(self) -> None:
        self._loading.load_state(is_main=self.worker == 0)

    def optimizer_state(self) -> dict[int, Any] | None:
        states = self._loading.pull_states(self._client)
        self._notice_rejoin()
        return self._loading.packed(states)

    def finish(self) -> None:
        while not self._client.finish(self._flat.weights_bytes()):
            pass  # the server restored a checkpoint; this script's loop is over, so other workers repeat the samples
        self._flat.scatter()

    def report_metric(self, name: str, value: float) -> None:
        self._client.measured(name, value)

    def close(self) -> None:
        self._client.close()


def exchange(
    client: Client,
    flat: FlatModel,
    computed: ComputedGradient,
    pulled_at: float,
    backward: Backward | None = None,
    whole: bool = False,
) -> None:
    """Push the flat gradient and pull into the flat weights.

    pulled_at: when the last pull ended, as `time.perf_counter` counts. Computing began then.
    backward: the backward pass that still computes the gradient, if it is pushed meanwhile.
    whole: send all parts of the update, where the codec sends one at a time.
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
        whole=whole,
    )
