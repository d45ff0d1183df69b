"""One incarnation of a worker, from its Welcome until it leaves: threads and sockets around a WorkerState.

A lost connection does not end it. The control connection comes back within the lease with Resume, and both sides
repeat what was not answered. It ends by the server's word: Expelled, which a server of another generation says too.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from paceline.job.worker import WorkerState
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.frames import MessageDecoder, WireError
from paceline.serve.wire.messages import (
    Accepted,
    CancelIteration,
    Challenge,
    Excluded,
    Expelled,
    FinishTraining,
    GradientReady,
    GradientStarted,
    GrantIteration,
    Heartbeat,
    Join,
    Leave,
    ProvideWeights,
    Push,
    PushNow,
    Refused,
    ReportMetric,
    RequestSamples,
    Resume,
    Resumed,
    SampleRange,
    TrainingFinished,
    Welcome,
)
from paceline.serve.worker.streamed_exchange import Backward
from paceline.serve.worker.transfers import Ending, IncarnationOver, Refusal, Transfers, raise_if_over, retry_pauses

log = logging.getLogger(__name__)

T = TypeVar("T")
FROM_COORDINATOR = MessageDecoder(
    Challenge
    | Accepted
    | Refused
    | Expelled
    | Welcome
    | Resumed
    | ProvideWeights
    | PushNow
    | GrantIteration
    | SampleRange
    | CancelIteration
    | Excluded
    | TrainingFinished
    | Heartbeat
    | Leave
)
CUT_SECONDS = 30.0  # a connection over which nothing gets through for so long, before a lease is agreed on, is lost
PARTING = 5.0  # seconds to wait for the server's answer when we have said that we leave


class Incarnation:
    """One incarnation of a worker."""

    def __init__(
        self, endpoint: Endpoint, description: bytes, worker: int | None, patience: float, generation: str | None = None
    ) -> None:
        """Joins; if a generation is given, only that one's server.

        patience: seconds for which a server that cannot be reached is called again.
        """
        self._endpoint, self._patience = endpoint, patience
        self.version = 0  # of the model that was last pulled
        self.pull_seconds = 0.0  # that it took
        self.granted: GrantIteration | None = None  # the last one that was taken
        self._control, self.generation = endpoint.open(FROM_COORDINATOR)
        try:
            if generation not in (None, self.generation):
                raise IncarnationOver("The server is of another generation.")
            self._control.limit_cut(CUT_SECONDS)  # the Welcome may take long; a dead link must not be waited for
            self._control.send(Join(worker), memoryview(description))
            self.welcome: Welcome = self._expect(Welcome)
        except BaseException:
            self._control.close()
            raise
        lease = self.welcome.lease
        self._control.limit_silence(lease)  # the server answers every Beat
        self._ending = Ending()
        self._transfers = Transfers(endpoint, self.welcome, self.generation, patience, self._ending)
        self._state = WorkerState()
        self._news = threading.Condition()  # guards the state; notified when something was heard
        self._sending = threading.Lock()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        threading.Thread(target=self._beat, args=(lease / 3,), daemon=True).start()

    @property
    def exclusion(self) -> str:
        """Why the policy leaves this worker out; empty if it takes part."""
        return self._state.exclusion

    def go_on(self, weights: memoryview) -> GrantIteration:
        """Wait for the next Grant, and pull the model into `weights`. If asked to, give them first."""
        state = self._state
        while True:
            self._await(lambda: state.gives or state.is_granted)
            with self._news:
                gives, state.gives = state.gives, False
                granted: GrantIteration | None = None if gives else state.take_grant()
            if granted:
                break
            self._transfers.begin(weights)
        if granted.pull:
            began = time.perf_counter()
            self.version = self._transfers.pull(granted.version, weights, granted.expected)
            self.pull_seconds = time.perf_counter() - began
        else:
            self.version = granted.version
        self.granted = granted
        return granted

    def answer(
        self,
        ready: Callable[[int, int], GradientReady],
        gradient: memoryview,
        weights: memoryview,
        rates: Sequence[float],
        dtype: str,
        soon: GradientStarted | None = None,
        backward: Backward | None = None,
    ) -> None:
        """Say that the gradient is there (`ready(iteration, version)`), and push it when it is our turn.

        Streamed, what comes back for it is in `weights` then. backward: the gradient is still being computed.
        """
        assert self.granted is not None
        iteration = self.granted.iteration
        said = False

        def computed() -> None:
            """Say so, once: also of an iteration that is cancelled, since its samples are to be given to others."""
            nonlocal said
            if not said:
                said = True
                self._say(self._state.tell_ready, ready(iteration, self.version))

        if soon:
            if backward:
                self._transfers.await_first_piece(backward)
            self._say(self._state.announce, soon)
        else:
            computed()
        if self._may_push(iteration):
            if self.welcome.streamed:
                self._transfers.stream(iteration, gradient, weights, tuple(rates), dtype, backward, computed)
            else:
                if backward:
                    backward.wait(0)
                computed()
                self._transfers.push(Push(iteration, tuple(rates), dtype), gradient)
        computed()

    def take(self, want: RequestSamples) -> SampleRange:
        """Samples to train on."""
        self._say(self._state.request, want)
        given: SampleRange = self._await(lambda: self._state.take_given(want.number))
        return given

    def finish(self, weights: memoryview) -> None:
        """Wait until the others are done too, and pull the last model."""
        if self._state.last_version is None:
            self._say(self._state.finish, FinishTraining())
            self._await(lambda: self._state.last_version is not None)
        assert self._state.last_version is not None
        self.version = self._transfers.pull(self._state.last_version, weights)

    def measured(self, measured: ReportMetric) -> None:
        """Tell what was measured. It is not said twice: lost with its connection, it is lost."""
        self._send([measured])

    def leave(self) -> bool:
        """Say good-bye. False if the server may not have heard it, and waits for this worker to come back."""
        if self._ending.error is not None:
            return not isinstance(self._ending.error, IncarnationOver)
        self._ending.over.set()
        self._say(self._state.leave, Leave())
        self._listener.join(PARTING)
        self.end(WireError("This worker has left."))
        return self._state.has_parted

    def end(self, error: ConnectionError) -> None:
        """Whatever waits here wakes with this error."""
        with self._news:
            if self._ending.error is None:
                self._ending.error = error
            self._ending.over.set()
            self._news.notify_all()
        self._control.close()
        self._transfers.close()

    # The coordinator

    def _expect(self, kind: type) -> Any:
        message = self._control.receive()
        raise_if_over(message)
        if not isinstance(message, kind):
            raise WireError(f"The server answered with {type(message).__name__} instead of {kind.__name__}.")
        return message

    def _say(self, note: Callable[[Any], list[Any]], message: Any) -> None:
        """Say something that is said again on a new connection until it is answered. note: has the state know."""
        with self._news:
            messages = note(message)
        self._send(messages)

    def _send(self, messages: list[Any]) -> None:
        with self._sending, contextlib.suppress(OSError):  # the listener sees it too, and comes back
            for message in messages:
                self._control.send(message)
            return
        self._control.cut()

    def _await(self, found: Callable[[], T]) -> T:
        """Wait until this is true, and return it. If the incarnation ends before, raise its error."""
        with self._news:
            while not (value := found()):
                self._ending.check()
                self._news.wait()
            return value

    def _may_push(self, iteration: int) -> bool:
        """True when it is our turn; False if the iteration is over."""
        state = self._state
        if not self.welcome.gated:
            return not state.is_over(iteration)
        self._await(lambda: state.turn(iteration) != "later")
        return state.turn(iteration) == "now"

    def _beat(self, pause: float) -> None:
        while not self._ending.over.wait(pause):
            self._say(self._state.beat, Heartbeat())

    def _listen(self) -> None:
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
                    self._come_back(error)
                except ConnectionError as final:
                    return self.end(final)
                continue
            with self._news:
                self._take_in(message)
                self._news.notify_all()
            if isinstance(message, Leave):
                return None

    def _take_in(self, message: Any) -> None:
        """Tell the state what the coordinator has said. Other messages, such as Resumed, change nothing."""
        state = self._state
        match message:
            case GrantIteration():
                state.granted(message)
            case PushNow():
                state.turned(message.iteration)
            case CancelIteration():
                state.cancelled(message.iteration)
            case SampleRange():
                state.given(message)
            case ProvideWeights():
                state.weights_requested()
            case Excluded():
                if not state.exclusion:
                    log.warning("Worker %d is left out: %s.", self.welcome.worker, message.reason)
                state.excluded(message.reason)
            case TrainingFinished():
                state.training_finished(message.version)
            case Heartbeat():
                state.beat_answered()
            case Leave():
                state.parted()

    def _come_back(self, lost: OSError) -> None:
        """Open the control connection again, as the same incarnation."""
        self._control.close()
        who = (self.welcome.worker, self.welcome.incarnation, self.welcome.ticket)
        for pause in retry_pauses(self._patience):
            if self._ending.over.is_set():
                raise WireError("This worker has left.")
            try:
                channel, _ = self._endpoint.open(FROM_COORDINATOR)
            except WireError:
                raise
            except OSError as error:
                lost = error
                self._ending.over.wait(pause)
                continue
            try:
                channel.send(Resume(*who, self.generation))
                with channel.within(10.0):
                    answer = channel.receive()
                raise_if_over(answer)
                if not isinstance(answer, Resumed):
                    raise WireError(f"The server answered with {type(answer).__name__} instead of Resumed.")
            except (Refusal, IncarnationOver, WireError):
                channel.close()
                raise
            except OSError as error:
                channel.close()
                lost = error
                self._ending.over.wait(pause)
                continue
            channel.limit_silence(self.welcome.lease)
            with self._sending:
                self._control = channel
                with self._news:
                    again = self._state.reconnected()
                with contextlib.suppress(OSError):
                    for message in again:
                        channel.send(message)
            if self._ending.over.is_set():  # meanwhile, and it was the old one that was closed
                channel.close()
            return
        raise WireError(
            f"The server at {self._endpoint.host}:{self._endpoint.port} cannot be reached any more: {lost}."
        )
