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
from collections.abc import Callable, Sequence

from paceline.model.codecs import Encoder, codec
from paceline.model.description import Description
from paceline.model.encodings import Floats
from paceline.serve.environment import JOINED, UPDATED, tell_launcher
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.frames import WireError
from paceline.serve.wire.messages import GrantIteration, OfferWeights, ReportMetric, RequestSamples, SampleRange
from paceline.serve.wire.tls import Tls
from paceline.serve.wire.tokens import token_for
from paceline.serve.worker.departure import Departure
from paceline.serve.worker.endings import IncarnationOver, Refusal, retry_pauses
from paceline.serve.worker.gradient import Backward, OutgoingGradient
from paceline.serve.worker.incarnation import LEAVE_SECONDS, Incarnation
from paceline.serve.worker.transfers import PartOf

log = logging.getLogger(__name__)

PATIENCE = 60.0  # seconds for which a worker retries to reach its server
NO_SHARDS = (
    "This job has no server for the model (--servers 0), so it cannot train: use --servers 1, or pace a loop of your "
    "own with paceline.coordinate()."
)


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
        tell: Callable[[str], None] | None = None,
        departure: Departure | None = None,
    ) -> None:
        """description: of the model, as JSON; empty if the server has no shards and only coordinates.

        token: the job's own, or one for the role of a worker.

        patience: seconds for which the worker retries to reach the server or a shard.
        tell: is called with a line for the user when the worker has joined, and when the job begins.
        departure: if the worker is asked to leave, methods raise Departed as soon as its last gradient is pushed.
        """
        self._endpoint = Endpoint(*address, token_for("worker", token), tls)
        self._description, self._patience = description, patience
        self.joins = 1  # how often this worker has joined; samples of an earlier incarnation belong to others now
        self._requests = 0  # for samples, so far
        self._taken: RequestSamples | None = None  # the request whose samples were taken last
        self._ahead: RequestSamples | None = None  # a request that was sent before its samples are needed
        self._weights: memoryview = memoryview(b"")
        self._encoder: Encoder | None = None
        self._exchanges = 0  # that have begun, in this generation of the server
        self.keeps_unsent = False  # does the caller add `unsent` to what it pulls?
        self._end: tuple[int, str] | None = None  # `end_samples`: the size of the data, and the generation it was told
        #: Whether samples for the next iteration may be requested before its pull (`take` returns them).
        self.asks_ahead = True
        #: Makes a shard's part of a checkpoint, if this worker has loaded the optimizer's state. It is sent, together
        #: with the weights, if the coordinator asks this worker for the weights.
        self.part_of: PartOf | None = None
        self._numbered = worker is not None
        self._tell = tell or (lambda _: None)
        self._has_updated = False
        self.departure = departure or Departure()
        self._incarnation = self._join(worker)
        self.departure.wakes(lambda: self._incarnation.hurry())
        if description and not self._incarnation.welcome.shards:
            self.close()
            raise WireError(NO_SHARDS)
        tell_launcher(JOINED)

    @property
    def worker(self) -> int:
        """This worker's number."""
        return self._incarnation.welcome.worker

    @property
    def workers(self) -> int:
        """The number of workers that the job starts with. More may join later."""
        return self._incarnation.welcome.workers

    @property
    def mixes(self) -> bool:
        """Whether the policy mixes models. Then this worker makes its own steps and pushes weights, not gradients."""
        return self._incarnation.welcome.mixes

    @property
    def sends_parts(self) -> bool:
        """Whether an update has one part of the model, and `unsent` the steps of this worker in the others."""
        name = self._incarnation.welcome.update_codec
        return bool(name) and not self.mixes and codec(name).parts > 1

    @property
    def unsent(self) -> Floats | None:
        """The rest of earlier updates that is sent with a later one, without running statistics; None: no codec yet."""
        return self._encoder.left if self._encoder else None

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
        """Wait for the first Grant, and pull the model into `weights`. If that fails, leave the job.

        If the model has no weights yet, the coordinator may ask this worker for them. Then it sends `weights`.
        """
        missing = self._incarnation.welcome.missing
        waiting = f"; waiting for {missing} more worker{'s' if missing > 1 else ''}" if missing else ""
        self._tell(f"Joined the job as worker {self.worker}{waiting}.")
        try:
            if self.sends_parts and not self.keeps_unsent:
                raise ValueError(
                    f"--updates {self._incarnation.welcome.update_codec} sends one part of the model at a time, for "
                    "workers with local_steps=; pass it to paceline.join, or start the job without the part behind /."
                )
            granted = self.go_on(weights)
        except BaseException:
            self.close()
            raise
        if missing:
            self._tell("All workers have joined; the job begins.")
        return granted

    def go_on(self, weights: memoryview) -> GrantIteration:
        """Wait for the next Grant, and pull the model into `weights`."""
        self._weights = weights
        while True:
            try:
                return self._incarnation.go_on(weights, self.part_of, self._request_ahead)
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
        whole: bool = False,
    ) -> GrantIteration:
        """Push a gradient, wait for the Grant, and pull the model into `weights`.

        taken: the numbers of the sample ranges (`take`) that the gradient was computed from.
        dtype: of the gradient's elements: float32, bfloat16 or float16.
        backward: the backward pass that is still computing the gradient. It tells how long it took, and the loss.
        whole: send all parts of it, where the codec sends one at a time.
        """
        encoder = self._encoder_now()
        outgoing = OutgoingGradient(
            gradient,
            tuple(rates),
            dtype,
            batch_size,
            compute_seconds,
            loss,
            tuple(taken),
            backward,
            encoder.whole() if encoder and whole else encoder,
            self._exchanges,
        )
        self._exchanges += 1
        try:
            self._incarnation.push(outgoing, weights)
        except IncarnationOver:
            self.departure.check()
            outgoing.take_back()
            self._join_again()
        except WireError:
            self.departure.check()  # the server may be asked to end too
            raise
        granted = self.go_on(weights)
        if not self._has_updated:
            self._has_updated = True
            tell_launcher(UPDATED)
        return granted

    def _encoder_now(self) -> Encoder | None:
        """Return what encodes this worker's updates, or None. It keeps what it leaves out, from one to the next."""
        name = self._incarnation.welcome.update_codec
        if not name or self.mixes:
            return None
        if self._encoder is None or self._encoder.codec.name != codec(name).name:
            described = Description.from_json(self._description)
            self._encoder = Encoder(name, described.layout.trained_elements, described.local_steps)
        return self._encoder

    def take(self, count: int, size: int, epochs: int, planned: int | None = None) -> SampleRange:
        """Return samples to train on, now or later; an empty range if the first `epochs` epochs have no more.

        planned: the number of epochs that will be trained in all, if it is known.
        If `joins` has increased meanwhile, the model was pulled again, and earlier samples and gradients are void.
        """
        while True:
            request, self._ahead = self._ahead, None
            is_sent = request is not None and (request.count, request.size) == (count, size)
            if request is None or not is_sent:
                request = self._request(count, size, epochs, planned)
            try:
                samples = self._incarnation.take(request, is_sent)
            except IncarnationOver:
                self._join_again()
                self.go_on(self._weights)
                continue
            if is_sent and samples.start == samples.stop:
                continue  # other workers may have returned samples since, and more epochs may have begun
            self._taken = request
            return samples

    def take_meanwhile(
        self, joins: int, count: int, size: int, epochs: int, planned: int | None = None
    ) -> SampleRange | None:
        """Return samples as `take` does, while another thread is in `exchange`. `asks_ahead` must be False.

        joins: what `joins` was when that thread began. Return None if this incarnation of the worker is over. Then the
        other thread joins again.
        """
        incarnation = self._incarnation
        if self.joins != joins:
            return None
        try:
            return incarnation.take(self._request(count, size, epochs, planned))
        except IncarnationOver:
            return None

    def end_samples(self, size: int) -> None:
        """Let the job hand out no samples from now on, so that all workers end. Only the main worker's call counts."""
        try:
            self._requests += 1
            self._incarnation.take(RequestSamples(self._requests, 1, size, 0, ends=True))
            self._end = size, self._incarnation.generation
        except IncarnationOver:
            self._join_again()
            self.go_on(self._weights)
            self.end_samples(size)

    def _request(self, count: int, size: int, epochs: int, planned: int | None) -> RequestSamples:
        """Return a new request for samples."""
        self._requests += 1
        return RequestSamples(self._requests, count, size, epochs, planned)

    def _request_ahead(self, granted: GrantIteration) -> RequestSamples | None:
        """Return a request for the samples of a new iteration: as many as were taken for the last one.

        They then arrive during the pull, and the worker does not wait for them. Return None if the policy wants another
        number of samples, or if the worker has taken none.
        """
        last, self._taken = self._taken, None
        if last is None or self._ahead or not self.asks_ahead or granted.batch_size not in (None, last.count):
            return None
        self._ahead = self._request(last.count, last.size, last.epochs, last.planned)
        return self._ahead

    def offer(self, weights: memoryview, replace: bool = False) -> None:
        """Offer `weights` to the job, and pull the model that the job continues with into `weights`.

        Only the main worker's weights count, and only until it has trained. replace: they count later too.
        """
        try:
            self._incarnation.offer(OfferWeights(replace), weights)
        except IncarnationOver:
            self._join_again()
            self.go_on(weights)

    def pull_state(self) -> list[bytes]:
        """Return each shard's part of the optimizer's state, as it is now."""
        while True:
            try:
                return self._incarnation.pull_state()
            except IncarnationOver:
                self._join_again()
                self.go_on(self._weights)

    def finish(self, weights: memoryview) -> bool:
        """Stop training, wait until the other workers have finished too, and pull the last model.

        Return False if the server has restored a checkpoint meanwhile. Then there may be samples to train on again
        (`take`). A caller that calls `finish` again instead leaves them to other workers.
        """
        while True:
            if self._end and self._end[1] != self._incarnation.generation:
                self.end_samples(self._end[0])  # a restored server hands samples out again
            try:
                self._incarnation.finish(weights)
                self.departure.release()  # nothing is pushed any more
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
        self.departure.release()
        if self.departure.asked:
            self._incarnation.settle()
            self._incarnation.leave(returns=True)
        elif not self._incarnation.leave():
            with contextlib.suppress(OSError):
                self._join(self.worker, LEAVE_SECONDS, self._incarnation.generation).leave()

    def _join_again(self) -> None:
        worker, was_lost, generation = self.worker, self._incarnation.is_lost, self._incarnation.generation
        self._incarnation.end(WireError("This incarnation is over."))
        self.joins += 1  # before there is a new incarnation, because `take_meanwhile` reads both in the other order
        try:
            self._incarnation = self._join(worker)
        except Refusal:
            if self._numbered:
                raise
            self._incarnation = self._join(None)  # another worker has this number now
        self._taken = self._ahead = None
        if self._incarnation.generation != generation:  # the model is another one, and samples are handed out again
            self._encoder, self._exchanges = None, 0
        if was_lost:
            log.warning("The server is back, and worker %d has joined again.", self.worker)

    def _join(self, worker: int | None, patience: float | None = None, generation: str | None = None) -> Incarnation:
        """Join the job. Retry for a while if the server cannot be reached yet, or has to restart."""
        lost: OSError | None = None
        for pause in retry_pauses(self._patience if patience is None else patience):
            try:
                return Incarnation(
                    self._endpoint, self._description, worker, self._patience, generation, self.departure
                )
            except (Refusal, IncarnationOver, WireError):
                raise
            except OSError as error:
                if lost is None:
                    where, why = f"{self._endpoint.host}:{self._endpoint.port}", error.strerror or error
                    log.warning("There is no server at %s (%s). Retrying for %.0f s.", where, why, self._patience)
                lost = error
                time.sleep(pause)
                self.departure.check()
        address, cause = f"{self._endpoint.host}:{self._endpoint.port}", lost and (lost.strerror or lost)
        raise WireError(f"The server at {address} cannot be reached ({cause}): start it, or correct its address.")
