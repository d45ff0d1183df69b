"""One incarnation of a worker, from its Welcome until it leaves: threads and sockets around a WorkerState.

A lost connection does not end an incarnation. The worker opens a new control connection within its lease and sends
Resume, and then both sides repeat what was not answered. The server ends an incarnation with Expelled; a server of
another generation does so too.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from paceline.job.worker import WorkerState
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.frames import WireError
from paceline.serve.wire.messages import (
    CancelIteration,
    EndVisit,
    Excluded,
    FinishTraining,
    GrantIteration,
    Heartbeat,
    KeepWeights,
    Leave,
    OfferWeights,
    ProvideWeights,
    PushNow,
    ReportMetric,
    RequestSamples,
    SampleRange,
    ShardMoved,
    TrainingFinished,
    VisitShard,
)
from paceline.serve.worker import control
from paceline.serve.worker.departure import Departure
from paceline.serve.worker.endings import Ending, IncarnationOver, Refusal, raise_if_over, retry_pauses
from paceline.serve.worker.gradient import OutgoingGradient
from paceline.serve.worker.transfers import PartOf, Transfers

log = logging.getLogger(__name__)

T = TypeVar("T")
LEAVE_SECONDS = 5.0  # to wait for the answer to Leave
SETTLE_SECONDS = 1.0  # to wait for the Grant of the last push, before a worker that was asked to leave does so
#: Seconds between two attempts to reconnect, from which on the user is told that the server is lost: after about a
#: second. A server that begins again with loaded weights is back sooner.
NOTICED_PAUSE = 0.5


class Incarnation:
    """One incarnation of a worker."""

    def __init__(
        self,
        endpoint: Endpoint,
        description: bytes,
        worker: int | None,
        patience: float,
        generation: str | None = None,
        departure: Departure | None = None,
    ) -> None:
        """Join the job. Raise IncarnationOver if the server is not of the given generation.

        patience: seconds for which the worker retries to reach the server or a shard.
        departure: while the worker waits for a Grant or for the end, it raises Departed if it is asked to leave.
        """
        self._departure = departure or Departure()
        self._endpoint, self._patience = endpoint, patience
        self.version = 0  # of the model that was last pulled
        self.pull_seconds = 0.0  # that the last pull took
        self.granted: GrantIteration | None = None  # the Grant under which the worker runs
        self.is_lost = False  # whether the server could not be reached when it was last tried
        self._control, self.generation, self.welcome = control.join(endpoint, worker, description, generation)
        lease = self.welcome.lease
        self._control.limit_silence(lease)  # the server answers every Heartbeat
        self._ending = Ending()
        self._transfers = Transfers(endpoint, self.welcome, self.generation, patience, self._ending, description)
        self._state = WorkerState()
        self._news = threading.Condition()  # guards the state; notified when a message has arrived
        self._sending = threading.Lock()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        threading.Thread(target=self._send_heartbeats, args=(lease / 3,), daemon=True).start()

    @property
    def exclusion(self) -> str:
        """Why the policy leaves this worker out; empty if it takes part."""
        return self._state.exclusion

    def go_on(
        self,
        weights: memoryview,
        part_of: PartOf | None = None,
        ahead: Callable[[GrantIteration], RequestSamples | None] | None = None,
    ) -> GrantIteration:
        """Wait for the next Grant, and pull the model into `weights`.

        If the coordinator asks this worker for the initial weights, send `weights` to the shards first.
        part_of: makes a shard's part of a checkpoint, if the optimizer's state is to be sent too.
        ahead: returns a request for samples, if some are to be requested before the pull. `take` returns them.
        """
        state = self._state
        while True:
            self._await(lambda: state.must_send_weights or state.is_granted, may_leave=True)
            with self._news:
                gives, state.must_send_weights = state.must_send_weights, False
                granted: GrantIteration | None = None if gives else state.take_grant()
            if granted:
                break
            self._transfers.send_initial_weights(weights, part_of)
        if ahead and (request := ahead(granted)):
            self._say(self._state.request, request)
        if granted.pull:
            began = time.perf_counter()
            self.version = self._transfers.pull(granted.version, weights, granted.expected)
            self.pull_seconds = time.perf_counter() - began
        else:
            self.version = granted.version
        self.granted = granted
        return granted

    def push(self, gradient: OutgoingGradient, weights: memoryview) -> None:
        """Announce a gradient to the coordinator, and push it to the shards when it is this worker's turn.

        Both paths send GradientReady exactly once, even if the iteration was cancelled, so that the samples of the
        gradient can be reassigned. Where updates are streamed, `weights` then hold the pieces that the shards returned.
        """
        if self.welcome.streamed:
            self._push_streamed(gradient, weights)
        else:
            self._push_whole(gradient)

    def _push_whole(self, gradient: OutgoingGradient) -> None:
        """Push the gradient when all of it is computed."""
        if gradient.backward is None:
            self._announce_ready(gradient)
            is_turn = self._await_turn()
        else:
            self._announce_started(gradient)
            is_turn = self._await_turn()
            gradient.backward.wait(0)
            self._announce_ready(gradient)
        if is_turn:
            self._transfers.push(self._iteration, gradient)

    def _push_streamed(self, gradient: OutgoingGradient, weights: memoryview) -> None:
        """Push each piece of the gradient as soon as it is computed."""
        if gradient.backward is None:
            self._announce_ready(gradient)
            receiving = self._stream_in_turn(gradient, weights)
        else:
            self._announce_started(gradient)
            receiving = self._stream_in_turn(gradient, weights)
            self._announce_ready(gradient)  # before the pieces are back: the coordinator may be waiting for it
        for future in receiving:
            future.result()

    def _stream_in_turn(self, gradient: OutgoingGradient, weights: memoryview) -> list[Future[None]]:
        """Send the pieces of a gradient when it is this worker's turn. Return what `Transfers.stream` returns."""
        if not self._await_turn():
            return []
        parts = self._state.parts
        visits = self._next_visit if parts else None
        return self._transfers.stream(self._iteration, gradient, weights, parts, visits, self._end_visit)

    def _next_visit(self) -> tuple[int, int] | None:
        """Wait for the next visit of this iteration. Return its shard and part, or None if the iteration is over."""
        state, iteration = self._state, self._iteration
        found = self._await(lambda: state.is_over(iteration) or state.take_visit(iteration))
        return None if isinstance(found, bool) else found

    def _end_visit(self, shard: int, part: int) -> None:
        self._say(self._state.end_visit, EndVisit(self._iteration, shard, part))

    def _announce_started(self, gradient: OutgoingGradient) -> None:
        """Tell the coordinator that a gradient is being computed, once its first piece can be pushed."""
        assert gradient.backward is not None
        self._transfers.await_first_piece(gradient.backward)
        self._say(self._state.announce, gradient.started(self._iteration, self.version))

    def _announce_ready(self, gradient: OutgoingGradient) -> None:
        """Tell the coordinator that a gradient is computed, once it is."""
        self._say(self._state.announce_ready, gradient.ready(self._iteration, self.version))

    @property
    def _iteration(self) -> int:
        assert self.granted is not None
        return self.granted.iteration

    def take(self, request: RequestSamples, is_sent: bool = False) -> SampleRange:
        """Request samples to train on, and wait for them. is_sent: `go_on` has requested them."""
        if not is_sent:
            self._say(self._state.request, request)
        given: SampleRange = self._await(lambda: self._state.take_samples(request.number))
        return given

    def offer(self, offer: OfferWeights, weights: memoryview) -> None:
        """Offer the worker's own weights to the job. If the job keeps others, pull them into `weights`.

        If the job takes the weights of the main worker, this incarnation ends.
        """
        assert self.granted is not None
        self._say(self._state.offer, offer)
        kept: KeepWeights = self._await(self._state.take_kept)
        self.version = self._transfers.pull(kept.version, weights, self.granted.expected)

    def pull_state(self) -> list[bytes]:
        """Return each shard's part of the optimizer's state."""
        return self._transfers.pull_state()

    def finish(self, weights: memoryview) -> None:
        """Wait until the other workers have finished too, and pull the last model."""
        if self._state.last_version is None:
            self._say(self._state.finish, FinishTraining())
            self._await(lambda: self._state.last_version is not None, may_leave=True)
        assert self._state.last_version is not None
        self.version = self._transfers.pull(self._state.last_version, weights, exact=True)

    def measured(self, metric: ReportMetric) -> None:
        """Send a metric to the coordinator once. It is lost if the connection is lost."""
        self._send([metric])

    def hurry(self) -> None:
        """Wake a thread that waits although it may leave, and wait for a lost server no longer than a few seconds."""
        with self._news:
            self._patience = self._transfers.patience = LEAVE_SECONDS
            self._news.notify_all()

    def settle(self) -> None:
        """Wait a moment for the Grant, which shows that the last push counts."""
        with self._news:
            self._news.wait_for(lambda: self._state.is_granted or self._ending.over.is_set(), SETTLE_SECONDS)

    def leave(self, returns: bool = False) -> bool:
        """Leave the job. Return False if the server may not know, and waits for this worker to come back.

        returns: the worker's machine is taken away, and the job may wait for the worker.
        """
        if self._ending.error is not None:
            return not isinstance(self._ending.error, IncarnationOver)
        self._ending.over.set()
        self._say(self._state.leave, Leave(returns))
        self._listener.join(LEAVE_SECONDS)
        self.end(WireError("This worker has left."))
        return self._state.leave_confirmed

    def end(self, error: ConnectionError) -> None:
        """End this incarnation. Every thread that waits in it wakes with the error."""
        with self._news:
            if self._ending.error is None:
                self._ending.error = error
            self._ending.over.set()
            self._news.notify_all()
        self._control.close()
        self._transfers.close()

    # The control connection

    def _say(self, note: Callable[[Any], list[Any]], message: Any) -> None:
        """Send a message that is repeated on a new connection until it is answered.

        note: the method of the state that takes note of the message.
        """
        with self._news:
            messages = note(message)
        self._send(messages)

    def _send(self, messages: list[Any]) -> None:
        with self._sending, contextlib.suppress(OSError):
            for message in messages:
                self._control.send(message)
            return
        self._control.cut()  # the listener notices, and reconnects

    def _await(self, found: Callable[[], T], may_leave: bool = False) -> T:
        """Wait until `found` returns something true, and return that. Raise the error if the incarnation ends.

        may_leave: raise Departed if the worker is asked to leave.
        """
        with self._news:
            while True:
                if may_leave:
                    self._departure.check()
                if value := found():
                    return value
                self._ending.check()
                self._news.wait()

    def _await_turn(self) -> bool:
        """Wait until the gradient may be pushed. Return False if its iteration is over."""
        state, iteration = self._state, self._iteration
        if not self.welcome.gated:
            return not state.is_over(iteration)
        self._await(lambda: state.turn(iteration) != "later")
        return state.turn(iteration) == "now"

    def _send_heartbeats(self, pause: float) -> None:
        while not self._ending.over.wait(pause):
            self._say(self._state.beat, Heartbeat())

    def _listen(self) -> None:
        """Receive the coordinator's messages until the incarnation ends."""
        while True:
            try:
                message = self._control.receive()
                raise_if_over(message)
            except (Refusal, IncarnationOver) as error:
                return self.end(error)
            except OSError as error:
                if self._ending.over.is_set():
                    return None
                try:
                    self._reconnect(error)
                except ConnectionError as final:
                    return self.end(final)
                continue
            with self._news:
                self._handle(message)
                self._news.notify_all()
            if isinstance(message, Leave):
                return None

    def _handle(self, message: Any) -> None:
        """Pass a message of the coordinator to the state. Other messages, such as Resumed, change nothing."""
        state = self._state
        match message:
            case GrantIteration():
                state.granted(message)
            case PushNow():
                state.turned(message.iteration, message.parts)
            case VisitShard():
                state.visit_ordered(message)
            case CancelIteration():
                state.cancelled(message.iteration)
            case SampleRange():
                state.given(message)
            case ProvideWeights():
                state.weights_requested()
            case KeepWeights():
                state.weights_kept(message)
            case Excluded():
                if not state.exclusion:
                    log.warning("Worker %d is left out: %s.", self.welcome.worker, message.reason)
                state.excluded(message.reason)
            case TrainingFinished():
                state.training_finished(message.version)
            case ShardMoved():
                self._transfers.move(message)
            case Heartbeat():
                state.beat_answered()
            case Leave():
                state.leave_answered()

    def _reconnect(self, lost: OSError) -> None:
        """Open a new control connection for this incarnation, and repeat what was not answered on the old one."""
        where = f"{self._endpoint.host}:{self._endpoint.port}"
        self._control.close()
        for pause in retry_pauses(self._patience):
            if self._ending.over.is_set():
                raise WireError("This worker has left.")
            try:
                channel = control.resume(self._endpoint, self.welcome, self.generation)
            except OSError as error:
                if isinstance(error, Refusal | IncarnationOver | WireError):
                    raise
                lost = error
                if not self.is_lost and pause >= NOTICED_PAUSE:
                    self.is_lost = True
                    why = error.strerror or error
                    log.warning("The server at %s is lost (%s). Retrying for %.0f s.", where, why, self._patience)
                self._ending.over.wait(pause)
                continue
            channel.limit_silence(self.welcome.lease)
            with self._sending:
                self._control = channel
                with self._news:
                    unanswered = self._state.reconnected()
                with contextlib.suppress(OSError):
                    for message in unanswered:
                        channel.send(message)
            if self._ending.over.is_set():  # `end` may have closed the old connection instead of this one
                channel.close()
            if self.is_lost:
                self.is_lost = False
                log.warning("The server at %s is back.", where)
            return
        raise WireError(f"The server at {where} can no longer be reached: {lost}.")
