"""A worker's client for the wire protocol. It works on flat buffers, and needs no tensor library.

client = Client(("127.0.0.1", 7000), description, token)
granted = client.begin(weights)                       # join, and pull the model into `weights`
while training:
    ...                                               # compute a gradient for granted.batch_size samples
    granted = client.exchange(gradient, weights, ...) # push it, wait for the Grant, pull the model
client.close()

The client reopens a lost connection by itself. If the worker was given up meanwhile, or the server has restored a
checkpoint, the client joins again. A new incarnation begins then. An update that was on its way is lost, but it is
never applied in part.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence

from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.frames import WireError
from paceline.serve.wire.messages import GrantIteration, ReportMetric, RequestSamples, SampleRange
from paceline.serve.wire.tls import Tls
from paceline.serve.worker.gradient import OutgoingGradient
from paceline.serve.worker.incarnation import LEAVE_SECONDS, Incarnation
from paceline.serve.worker.streamed_exchange import Backward
from paceline.serve.worker.transfers import IncarnationOver, Refusal, retry_pauses

log = logging.getLogger(__name__)

PATIENCE = 60.0  # seconds for which a worker retries to reach its server


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
        """description: of the model, as JSON; empty if the server has no shards and only coordinates.

        patience: seconds for which the worker retries to reach the server or a shard.
        """
        self._endpoint = Endpoint(*address, token, tls)
        self._description, self._patience = description, patience
        self.joins = 1  # how often this worker has joined; samples of an earlier incarnation belong to others now
        self._taken = 0  # number of the last request for samples
        self._weights: memoryview = memoryview(b"")
        self._numbered = worker is not None
        self._incarnation = self._join(worker)

    @property
    def worker(self) -> int:
        """This worker's number."""
        return self._incarnation.welcome.worker

    @property
    def mixes(self) -> bool:
        """Whether the policy mixes models. Then this worker makes its own steps and pushes weights, not gradients."""
        return self._incarnation.welcome.mixes

    @property
    def streamed(self) -> bool:
        """Whether the shards apply and return each piece of an update as it arrives."""
        return self._incarnation.welcome.streamed

    @property
    def version(self) -> int:
        """The version of the model that was last pulled."""
        return self._incarnation.version

    @property
    def pull_seconds(self) -> float:
        """The duration of the last pull, from the request to the last byte."""
        return self._incarnation.pull_seconds

    @property
    def granted(self) -> GrantIteration:
        """The Grant under which this worker runs."""
        assert self._incarnation.granted is not None
        return self._incarnation.granted

    def begin(self, weights: memoryview) -> GrantIteration:
        """Wait for the first Grant, and pull the model into `weights`.

        If the model has no weights yet, the coordinator may ask this worker for them. Then it sends `weights`.
        """
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

        taken: the numbers of the sample ranges (`take`) that the gradient was computed from.
        dtype: of the gradient's elements: float32, bfloat16 or float16.
        backward: the backward pass that is still computing the gradient. It tells how long it took, and the loss.
        """
        outgoing = OutgoingGradient(
            gradient, tuple(rates), dtype, batch_size, compute_seconds, loss, tuple(taken), backward
        )
        try:
            self._incarnation.push(outgoing, weights)
        except IncarnationOver:
            self._join_again()
        return self.go_on(weights)

    def take(self, count: int, size: int, epochs: int) -> SampleRange:
        """Return samples to train on, now or later; an empty range if there are no more.

        If `joins` has increased meanwhile, the model was pulled again, and earlier samples and gradients are void.
        """
        while True:
            self._taken += 1
            try:
                return self._incarnation.take(RequestSamples(self._taken, count, size, epochs))
            except IncarnationOver:
                self._join_again()
                self.go_on(self._weights)

    def finish(self, weights: memoryview) -> bool:
        """Stop training, wait until the other workers have finished too, and pull the last model.

        Return False if the server has restored a checkpoint meanwhile. Then there may be samples to train on again
        (`take`). A caller that calls `finish` again instead leaves them to other workers.
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
                except ConnectionError as error:  # given up while it waited; the other workers have ended the job
                    log.warning("The last model was not pulled. It is in the server's checkpoint. %s", error)
                    return True
                if self._incarnation.generation != generation:
                    self.go_on(weights)
                    return False

    def measured(self, kind: str, value: float) -> None:
        """Report a metric, such as an accuracy or a validation loss, to the policy and to observers."""
        self._incarnation.measured(ReportMetric(kind, value))

    def close(self) -> None:
        """Leave the job. If the server may not know, join once more and leave, so that it does not wait."""
        if not self._incarnation.leave():
            with contextlib.suppress(OSError):
                self._join(self.worker, LEAVE_SECONDS, self._incarnation.generation).leave()

    def _join_again(self) -> None:
        worker = self.worker if self._numbered else None
        self._incarnation.end(WireError("This incarnation is over."))
        self._incarnation = self._join(worker)
        self.joins += 1

    def _join(self, worker: int | None, patience: float | None = None, generation: str | None = None) -> Incarnation:
        """Join the job. Retry for a while if the server cannot be reached yet, or has to restart."""
        lost: OSError | None = None
        for pause in retry_pauses(self._patience if patience is None else patience):
            try:
                return Incarnation(self._endpoint, self._description, worker, self._patience, generation)
            except (Refusal, IncarnationOver, WireError):
                raise
            except OSError as error:
                if lost is None:
                    where, seconds = f"{self._endpoint.host}:{self._endpoint.port}", self._patience
                    log.warning("There is no server at %s (%s). Retrying for %.0f s.", where, error, seconds)
                lost = error
                time.sleep(pause)
        raise WireError(f"The server at {self._endpoint.host}:{self._endpoint.port} cannot be reached: {lost}.")
