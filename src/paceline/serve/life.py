"""One incarnation of a worker: from its Welcome until it leaves or is given up.

A lost connection does not end it. The control connection comes back within the lease with Resume, and both sides
repeat what was not answered; a connection to a shard is opened again, and the push or pull on it is done again, which
the shard bears. What ends it is the server's word (Expelled), or a server of another generation.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from paceline.model.half import WIDTH
from paceline.serve.door import Door
from paceline.serve.exchange import Backward, Exchange, Part, visits
from paceline.serve.messages import (
    Accepted,
    Barred,
    Beat,
    Begin,
    Begun,
    Cancelled,
    Challenge,
    Expelled,
    Finish,
    Finished,
    Give,
    Given,
    Go,
    Granted,
    Hello,
    Join,
    Leave,
    May,
    Measured,
    Pull,
    Push,
    Pushed,
    Ready,
    Refused,
    Resume,
    Resumed,
    Returned,
    Soon,
    Turned,
    Want,
    Weights,
    Welcome,
)
from paceline.serve.wire import Channel, Reader, WireError

log = logging.getLogger(__name__)

FROM_COORDINATOR = Reader(
    Challenge
    | Accepted
    | Refused
    | Expelled
    | Welcome
    | Resumed
    | Give
    | Turned
    | Granted
    | Given
    | Cancelled
    | Barred
    | Finished
    | Beat
    | Leave
)
FROM_SHARD = Reader(Challenge | Accepted | Refused | Expelled | Begun | Go | Pushed | Returned | Weights)
CUT_SECONDS = 30.0  # a connection over which nothing gets through for so long, before a lease is agreed on, is lost
PARTING = 5.0  # seconds to wait for the server's answer when we have said that we leave
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds between attempts to connect


class Refusal(ConnectionError):
    """The server does not want this worker; the message says why."""


class Over(ConnectionError):
    """This incarnation is over; the worker may join again."""


def attempts(seconds: float) -> Iterator[float]:
    """Pauses between attempts, longer and longer, for so many seconds in all."""
    end, pause = time.monotonic() + seconds, FIRST_PAUSE
    while (left := end - time.monotonic()) > 0:
        yield min(pause, left)
        pause = min(2 * pause, LONGEST_PAUSE)


class Life:
    """One incarnation of a worker."""

    def __init__(
        self, door: Door, description: bytes, worker: int | None, patience: float, generation: str | None = None
    ) -> None:
        """Joins; if a generation is given, only that one's server.

        patience: seconds for which a server that cannot be reached is called again.
        """
        self._door, self._patience = door, patience
        self.version = 0  # of the model that was last pulled
        self.pull_seconds = 0.0  # that it took
        self.barred = ""  # why it is not granted any more, if it is not
        self.granted: Granted | None = None  # the last one
        self._control, self.generation = door.open(FROM_COORDINATOR)
        try:
            if generation not in (None, self.generation):
                raise Over("The server is of another generation.")
            self._control.bear_cut(CUT_SECONDS)  # the Welcome may take long; a dead link must not be waited for
            self._control.send(Join(worker), memoryview(description))
            self.welcome: Welcome = self._expect(Welcome)
        except BaseException:
            self._control.close()
            raise
        lease = self.welcome.lease
        self._control.bear_silence(lease)  # the server answers every Beat
        self._parts = [
            Part(number, door.at(host, port), pieces) for number, (host, port, pieces) in enumerate(self.welcome.shards)
        ]
        self._threads = ThreadPoolExecutor(max(1, len(self._parts)), thread_name_prefix="paceline")
        self._sending = threading.Lock()
        self._unanswered: dict[str, Any] = {}  # what is said again on a new connection
        self._heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._later: deque[Any] = deque()  # heard while something else was waited for
        self._newest = 0  # iteration of the newest Grant that was heard
        self._parted = False  # has the server heard that we leave?
        self._ended: ConnectionError | None = None
        self._over = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        threading.Thread(target=self._beat, args=(lease / 3,), daemon=True).start()

    def go_on(self, weights: memoryview) -> Granted:
        """Wait for the next Grant, and pull the model into `weights`. If asked to, give them first."""
        while not isinstance(message := self._hear(), Granted):
            if isinstance(message, Give):
                self._on_all(partial(self._begin, weights))
        if message.pull:
            began = time.perf_counter()
            self._pull_all(message.version, weights, message.expected)
            self.pull_seconds = time.perf_counter() - began
        else:
            self.version = message.version
        self.granted = message
        return message

    def answer(
        self,
        ready: Callable[[int, int], Ready],
        gradient: memoryview,
        weights: memoryview,
        rates: Sequence[float],
        dtype: str,
        soon: Soon | None = None,
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
                with self._sending:
                    self._unanswered.pop("Turned", None)
                self._say(ready(iteration, self.version), unanswered="Granted")

        if soon:
            if backward and self._parts:  # a turn that comes too early is time that others wait
                part, piece = visits(self._parts, self.welcome.worker, from_the_end=True)[0]
                backward.wait(part.pieces[piece][0])
            self._say(soon, unanswered="Turned")
        else:
            computed()
        if self._newest <= iteration and (not self.welcome.gated or self._await_turn(iteration)):
            if self.welcome.streamed:
                self._stream(iteration, gradient, weights, tuple(rates), dtype, backward, computed)
            else:
                if backward:
                    backward.wait(0)
                computed()
                push = Push(iteration, tuple(rates), dtype)
                self._on_all(lambda part: self._push(part, push, gradient))
        computed()

    def take(self, want: Want) -> Given:
        """Samples to train on."""
        self._say(want, unanswered="Given")
        while not (isinstance(message := self._hear_next(), Given) and message.number == want.number):
            self._later.append(message)
        return message

    def finish(self, weights: memoryview) -> None:
        """Wait until the others are done too, and pull the last model."""
        self._say(Finish(), unanswered="Finished")
        while not isinstance(message := self._hear(), Finished):
            pass
        self._pull_all(message.version, weights)

    def measured(self, measured: Measured) -> None:
        """Tell what was measured. It is not said twice: lost with its connection, it is lost."""
        self._say(measured)

    def leave(self) -> bool:
        """Say good-bye. False if the server may not have heard it, and waits for this worker to come back."""
        if self._ended is not None:
            return not isinstance(self._ended, Over)
        self._over.set()
        self._say(Leave())
        self._listener.join(PARTING)
        self.end(WireError("This worker has left."))
        return self._parted

    def end(self, error: ConnectionError) -> None:
        """Whatever waits here wakes with this error."""
        if self._ended is None:
            self._ended = error
        self._over.set()
        self._heard.put(self._ended)
        self._control.close()
        for part in self._parts:
            part.hang_up()
        self._threads.shutdown(wait=False)

    # The coordinator

    def _expect(self, kind: type) -> Any:
        message = self._control.receive()
        _heed(message)
        if not isinstance(message, kind):
            raise WireError(f"The server answered with {type(message).__name__} instead of {kind.__name__}.")
        return message

    def _say(self, message: Any, unanswered: str = "") -> None:
        """Say it; if the connection is lost, it is said again on the next one until it is answered."""
        with self._sending:
            if unanswered:
                self._unanswered[unanswered] = message
            with contextlib.suppress(OSError):  # the listener sees it too, and comes back
                self._control.send(message)
                return
        self._control.cut()

    def _beat(self, pause: float) -> None:
        while not self._over.wait(pause):
            self._say(Beat())

    def _listen(self) -> None:
        while True:
            try:
                message = self._control.receive()
                _heed(message)
            except (Refusal, Over) as error:
                return self.end(error)
            except OSError as error:
                if self._over.is_set():
                    return None
                try:
                    self._come_back(error)
                except ConnectionError as final:
                    return self.end(final)
                continue
            if isinstance(message, Leave):
                self._parted = True
                return None
            self._take_in(message)

    def _take_in(self, message: Any) -> None:
        if isinstance(message, Granted):
            if message.iteration <= self._newest:
                return  # said again on a new connection
            self._newest = message.iteration
            self.barred = ""
        if isinstance(message, Barred):
            if not self.barred:
                log.warning("Worker %d is left out: %s.", self.welcome.worker, message.why)
            self.barred = message.why
            return
        kind = type(message).__name__
        if kind in self._unanswered:
            with self._sending:
                self._unanswered.pop(kind, None)
        if not isinstance(message, Beat):
            self._heard.put(message)

    def _come_back(self, lost: OSError) -> None:
        """Open the control connection again, as the same incarnation."""
        self._control.close()
        for pause in attempts(self._patience):
            if self._over.is_set():
                raise WireError("This worker has left.")
            try:
                channel, generation = self._door.open(FROM_COORDINATOR)
            except WireError:
                raise
            except OSError as error:
                lost = error
                self._over.wait(pause)
                continue
            if generation != self.generation:
                channel.close()
                raise Over("The server is of another generation.")
            try:
                channel.send(Resume(self.welcome.worker, self.welcome.incarnation, self.welcome.ticket))
                with channel.within(10.0):
                    answer = channel.receive()
                _heed(answer)
                if not isinstance(answer, Resumed):
                    raise WireError(f"The server answered with {type(answer).__name__} instead of Resumed.")
            except (Refusal, Over, WireError):
                channel.close()
                raise
            except OSError as error:
                channel.close()
                lost = error
                self._over.wait(pause)
                continue
            channel.bear_silence(self.welcome.lease)
            with self._sending:
                self._control = channel
                with contextlib.suppress(OSError):
                    for message in self._unanswered.values():
                        channel.send(message)
            if self._over.is_set():  # meanwhile, and it was the old one that was closed
                channel.close()
            return
        raise WireError(f"The server at {self._door.host}:{self._door.port} cannot be reached any more: {lost}.")

    def _await_turn(self, iteration: int) -> bool:
        """True when it is our turn; False if the iteration was cancelled."""
        while True:
            message = self._hear()
            if isinstance(message, Turned | Cancelled) and message.iteration == iteration:
                return isinstance(message, Turned)

    def _hear(self) -> Any:
        return self._later.popleft() if self._later else self._hear_next()

    def _hear_next(self) -> Any:
        message = self._heard.get()
        if isinstance(message, ConnectionError):
            self._heard.put(message)  # for whoever asks next
            raise message
        return message

    # Shards

    def _stream(
        self,
        iteration: int,
        gradient: memoryview,
        weights: memoryview,
        rates: tuple[float, ...],
        dtype: str,
        backward: Backward | None,
        computed: Callable[[], None],
    ) -> None:
        """Push piece by piece, and take in what comes back meanwhile. computed: is called when all of it is there."""
        exchange = Exchange(lambda piece: Push(iteration, rates, dtype, piece), gradient, WIDTH[dtype], weights, _heed)
        try:
            coming = [self._threads.submit(self._with, part, partial(exchange.receive, part)) for part in self._parts]
        except RuntimeError:  # shut down meanwhile
            raise self._ended or WireError("This worker has left.") from None
        last: Part | None = None
        for part, piece in visits(self._parts, self.welcome.worker, from_the_end=backward is not None):
            if last is not None and last is not part and not backward:
                exchange.drain(last)
            last = part
            if backward:
                backward.wait(part.pieces[piece][0])
            if self._ended:
                raise self._ended
            exchange.send(part, piece)
        computed()
        for each in coming:
            each.result()

    def _begin(self, weights: memoryview, part: Part) -> None:
        for piece in range(len(part.pieces)):
            self._ask(part, Begin(piece), part.piece(weights, piece))

    def _push(self, part: Part, push: Push, gradient: memoryview) -> None:
        self._ask(part, push, part.piece(gradient, 0, WIDTH[push.dtype]), May() if self.welcome.asks else None)

    def _ask(self, part: Part, message: Any, body: memoryview, may: May | None = None) -> None:
        """Send it, and again until it is answered. `may`: ask first."""

        def do(channel: Channel) -> None:
            if may:
                channel.send(may)
                _heed(channel.receive())
            channel.send(message, body)
            _heed(channel.receive())

        self._with(part, do)

    def _pull(self, pull: Pull, weights: memoryview, part: Part) -> None:
        scratch = bytearray()

        def place(message: Any, size: int) -> memoryview:
            nonlocal scratch
            if isinstance(message, Weights):
                return part.piece(weights, message.piece)
            scratch = bytearray(size)
            return memoryview(scratch)

        def do(channel: Channel) -> int:
            channel.send(pull)
            left = len(part.pieces)
            while left:
                answer = channel.receive(place)
                _heed(answer)
                left -= not isinstance(answer, Returned)  # of a push that was sent twice
            return int(answer.version)

        part.version = self._with(part, do)

    def _pull_all(self, version: int, weights: memoryview, expected: int | None = None) -> None:
        """Pull this version or a newer one, the same from all shards: half an update is never seen.

        expected: as it will be so many versions later. None: as it is, and so it must be where it is the last.

        A shard may have gone on while another was asked. It is seldom, as all are asked at once; then all are asked
        again: one alone, asked later, would be ahead of the others.
        """
        for part in self._parts:
            part.version = -1
        asked = Pull(version, expected)
        while any(part.version < version for part in self._parts):
            self._on_all(partial(self._pull, asked, weights))  # all at once, so that they agree
            version = max(part.version for part in self._parts)
            if expected is not None:  # of the versions that are to follow, these have
                expected = max(0, expected - (version - asked.version))
            asked = Pull(version, expected)
        self.version = version

    def _with(self, part: Part, do: Callable[[Channel], Any]) -> Any:
        """Do something with a shard, and again on a new connection when the old one is lost."""
        pauses: Iterator[float] | None = None  # from the first failure on: a transfer may itself take long
        while True:
            if self._ended:
                raise self._ended
            try:
                if part.channel is None:
                    part.channel = self._connect(part)
                    if self._ended:  # meanwhile: whoever ended it may have hung up before this was there
                        part.hang_up()
                        raise self._ended
                return do(part.channel)
            except (Refusal, Over):
                raise
            except OSError as error:
                part.hang_up()
                pauses = pauses or attempts(self._patience)
                pause = next(pauses, None)
                if pause is None and not self._ended:
                    where = f"{part.door.host}:{part.door.port}"
                    raise WireError(f"The shard at {where} cannot be reached any more: {error}.") from None
                self._over.wait(pause or 0.0)

    def _connect(self, part: Part) -> Channel:
        channel, generation = part.door.open(FROM_SHARD)
        if generation != self.generation:
            channel.close()
            raise Over("The server is of another generation.")
        channel.bear_cut(max(1.0, self.welcome.lease))
        channel.bear_silence(self.welcome.lease)  # a shard answers at once, or its answer was lost on the way
        try:
            channel.send(Hello(self.welcome.worker, self.welcome.incarnation, self.welcome.ticket))
        except OSError:
            channel.close()
            raise
        return channel

    def _on_all(self, do: Callable[[Part], Any]) -> list[Any]:
        """Do the same with every shard, side by side."""
        if len(self._parts) == 1:
            return [do(self._parts[0])]
        try:
            return list(self._threads.map(do, self._parts))
        except RuntimeError:  # shut down meanwhile
            raise self._ended or WireError("This worker has left.") from None


def _heed(message: Any) -> None:
    """Some answers are the end of it."""
    if isinstance(message, Refused):
        raise Refusal(message.reason)
    if isinstance(message, Expelled):
        raise Over(message.reason)
