"""A worker's side of the wire, over flat buffers: it knows no tensor library.

client = Client(("127.0.0.1", 7000), description, token)
granted = client.begin(weights)                       # join, and pull the model into `weights`
while training:
    ...                                               # compute a gradient for granted.batch_size samples
    granted = client.exchange(gradient, weights, ...) # push it, wait for the Grant, pull the model
client.close()

It survives what can be survived. A lost connection comes back by itself. If the worker was given up meanwhile, or the
server has restored a checkpoint, it joins again: a new life begins, and what was on its way is lost, but never half.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence

from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.frames import WireError
from paceline.serve.wire.messages import (
    GradientReady,
    GradientStarted,
    GrantIteration,
    ReportMetric,
    RequestSamples,
    SampleRange,
)
from paceline.serve.wire.tls import Tls
from paceline.serve.worker.incarnation import PARTING, Incarnation
from paceline.serve.worker.streamed_exchange import Backward
from paceline.serve.worker.transfers import IncarnationOver, Refusal, retry_pauses

__all__ = ["Client", "Refusal"]

log = logging.getLogger(__name__)

PATIENCE = 60.0  # seconds for which a server that cannot be reached is called again


class Client:
    """One worker of a job."""

    def __init__(
        self,
        address: tuple[str, int],
        description: bytes,
        token: bytes = b"",
        worker: int | None = None,
        *,
        tls: Tls | None = None,
        patience: float = PATIENCE,
    ) -> None:
        """description: of the model; empty where the server has no shards, and only paces."""
        self._endpoint = Endpoint(*address, token, tls)
        self._description, self._patience = description, patience
        self.joins = 1  # how often this worker has joined; samples taken in an earlier life are not its own any more
        self._taken = 0  # number of the last samples asked for
        self._weights: memoryview = memoryview(b"")
        self._numbered = worker is not None
        self._incarnation = self._join(worker)

    @property
    def worker(self) -> int:
        """This worker's number."""
        return self._incarnation.welcome.worker

    @property
    def mixes(self) -> bool:
        """Does the policy mix models? Then this worker makes its own steps, and pushes weights instead of gradients."""
        return self._incarnation.welcome.mixes

    @property
    def streamed(self) -> bool:
        """Is each piece of an update applied and returned as it comes?"""
        return self._incarnation.welcome.streamed

    @property
    def version(self) -> int:
        """Of the model that was last pulled."""
        return self._incarnation.version

    @property
    def pull_seconds(self) -> float:
        """What the last pull took, from asking to the last byte."""
        return self._incarnation.pull_seconds

    @property
    def granted(self) -> GrantIteration:
        """The Grant under which this worker runs."""
        assert self._incarnation.granted is not None
        return self._incarnation.granted

    def begin(self, weights: memoryview) -> GrantIteration:
        """Take part: pull the model when the policy lets this worker go. If nobody has, give the first weights."""
        return self.go_on(weights)

    def go_on(self, weights: memoryview) -> GrantIteration:
        """Wait for the next Grant, and pull the model into `weights`."""
        self._weights = weights
        while True:
            try:
                return self._incarnation.go_on(weights)
            except IncarnationOver:
                self._join_again()

    def exchange(
        self,
        gradient: memoryview,
        weights: memoryview,
        *,
        batch_size: int,
        compute_seconds: float = 0.0,
        rates: Sequence[float],
        loss: float | None = None,
        taken: Sequence[int] = (),
        dtype: str = "float32",
        backward: Backward | None = None,
    ) -> GrantIteration:
        """Push a gradient, wait for the Grant, and pull the model into `weights`.

        taken: the numbers of the samples (`take`) that the gradient was computed from.
        dtype: what the gradient's bytes are: float32, bfloat16 or float16.
        backward: the gradient is still being computed; how long that took, and the loss, it tells then.
        """

        def ready(iteration: int, version: int) -> GradientReady:
            seconds, known = backward.outcome() if backward else (compute_seconds, loss)
            return GradientReady(iteration, version, batch_size, seconds, known, tuple(taken))

        soon = GradientStarted(self.granted.iteration, self.version, batch_size) if backward else None
        try:
            self._incarnation.answer(ready, gradient, weights, rates, dtype, soon, backward)
        except IncarnationOver:
            self._join_again()
        return self.go_on(weights)

    def take(self, count: int, size: int, epochs: int) -> SampleRange:
        """Samples to train on, now or later; an empty range when there are no more.

        If `joins` has gone up meanwhile, the model was pulled anew, and earlier samples and gradients are void.
        """
        while True:
            self._taken += 1
            try:
                return self._incarnation.take(RequestSamples(self._taken, count, size, epochs))
            except IncarnationOver:
                self._join_again()
                self.go_on(self._weights)

    def finish(self, weights: memoryview) -> bool:
        """Take no more part in the training; wait until the others are done too, and pull the last model.

        False if the server went back to a checkpoint meanwhile. There may be samples to train on again (`take`); who
        calls this again instead leaves them to others.
        """
        while True:
            try:
                self._incarnation.finish(weights)
                return True
            except IncarnationOver:
                generation = self._incarnation.generation
                try:
                    self._join_again()
                except Refusal:
                    raise
                except ConnectionError as error:  # given up while it waited, and the others have ended the job
                    log.warning("The last model was not pulled, it is in the server's checkpoint: %s", error)
                    return True
                if self._incarnation.generation != generation:
                    self.go_on(weights)
                    return False

    def measured(self, kind: str, value: float) -> None:
        """Tell the policy, and whoever watches, what was measured: an accuracy, a validation loss."""
        self._incarnation.measured(ReportMetric(kind, value))

    def close(self) -> None:
        """Leave the job. One who may not have been heard comes back to say so again, or it would be waited for."""
        if not self._incarnation.leave():
            with contextlib.suppress(OSError):
                self._join(self.worker, PARTING, self._incarnation.generation).leave()

    def _join_again(self) -> None:
        worker = self.worker if self._numbered else None
        self._incarnation.end(WireError("This life is over."))
        self._incarnation = self._join(worker)
        self.joins += 1

    def _join(self, worker: int | None, patience: float | None = None, generation: str | None = None) -> Incarnation:
        """Join; a server that is not there yet, or not there again, is called for a while."""
        lost: OSError | None = None
        for pause in retry_pauses(self._patience if patience is None else patience):
            try:
                return Incarnation(self._endpoint, self._description, worker, self._patience, generation)
            except (Refusal, IncarnationOver, WireError):
                raise
            except OSError as error:
                if lost is None:
                    where, seconds = f"{self._endpoint.host}:{self._endpoint.port}", self._patience
                    log.warning("There is no server at %s (%s); it is called for %.0f s.", where, error, seconds)
                lost = error
                time.sleep(pause)
        raise WireError(f"The server at {self._endpoint.host}:{self._endpoint.port} cannot be reached: {lost}.")
