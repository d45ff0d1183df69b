"""A worker's side of the wire, over flat buffers: it knows no tensor library.

client = Client(("127.0.0.1", 7000), description, token)
granted = client.begin(weights)                       # join, and pull the model into `weights`
while training:
    ...                                               # compute a gradient for granted.batch_size samples
    granted = client.exchange(gradient, weights, ...) # push it, wait for the Grant, pull the model
client.close()
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paceline.model.half import WIDTH
from paceline.serve import greeting
from paceline.serve.messages import (
    Accepted,
    Beat,
    Begin,
    Cancelled,
    Challenge,
    Given,
    Granted,
    Hello,
    Join,
    Leave,
    Pull,
    Push,
    Pushed,
    Ready,
    Refused,
    Turned,
    Want,
    Weights,
    Welcome,
)
from paceline.serve.wire import Channel, Reader, WireError

FROM_COORDINATOR = Reader(Challenge | Accepted | Refused | Welcome | Turned | Granted | Given | Cancelled)
FROM_SHARD = Reader(Challenge | Accepted | Refused | Pushed | Weights)
ELEMENT = 4  # bytes of a float32
PARTING = 2.0  # seconds to wait for the server to hang up after we have said that we leave


class Refusal(ConnectionError):
    """The server does not want this worker; the message says why."""


class _Part:
    """One shard, and the part of the model that it holds."""

    def __init__(self, address: tuple[str, int], start: int, stop: int, token: bytes, hello: Hello) -> None:
        self._start, self._stop = start, stop
        self._channel = Channel(socket.create_connection(address), FROM_SHARD)
        try:
            greeting.call(self._channel, token)
            self._channel.send(hello)
        except BaseException:
            self._channel.close()
            raise

    def begin(self, weights: memoryview) -> None:
        self._channel.send(Begin(), self._mine(weights))

    def push(self, push: Push, gradient: memoryview) -> None:
        self._channel.send(push, self._mine(gradient, WIDTH[push.dtype]))
        self._answer()

    def pull(self, pull: Pull, weights: memoryview) -> int:
        self._channel.send(pull)
        return int(self._answer(self._mine(weights)).version)

    def _mine(self, flat: memoryview, width: int = ELEMENT) -> memoryview:
        return flat[self._start * width : self._stop * width]

    def close(self) -> None:
        self._channel.close()

    def _answer(self, body: memoryview | None = None) -> Any:
        answer = self._channel.receive(None if body is None else lambda _message, _size: body)
        if isinstance(answer, Refused):
            raise Refusal(answer.reason)
        return answer


class Client:
    """One worker of a job."""

    def __init__(
        self, address: tuple[str, int], description: bytes, token: bytes = b"", worker: int | None = None
    ) -> None:
        self._parts: list[_Part] = []
        self._control = Channel(socket.create_connection(address), FROM_COORDINATOR)
        try:
            self.welcome = self._join(description, token, worker)
        except BaseException:
            self._hang_up()
            raise
        self.version = 0  # of the model that was last pulled
        self.life = 1  # how often this worker has joined; samples taken in an earlier life are not its own any more
        self._taken = 0  # number of the last samples asked for
        self._sending = threading.Lock()
        self._threads = ThreadPoolExecutor(len(self._parts), thread_name_prefix="paceline")
        self._heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._later: deque[Any] = deque()  # heard while something else was waited for
        self._over = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        threading.Thread(target=self._beat, daemon=True).start()

    @property
    def worker(self) -> int:
        """This worker's number."""
        return self.welcome.worker

    def begin(self, weights: memoryview) -> Granted:
        """Take part: give the first weights if nobody has, and pull the model when the policy lets this worker go."""
        if self.welcome.gives_weights:
            self._on_all(lambda part: part.begin(weights))
        return self.go_on(weights)

    def exchange(
        self,
        gradient: memoryview,
        weights: memoryview,
        *,
        granted: Granted,
        batch_size: int,
        compute_seconds: float,
        rates: Sequence[float],
        loss: float | None = None,
        taken: Sequence[int] = (),
        dtype: str = "float32",
    ) -> Granted:
        """Push a gradient, wait for the Grant, and pull the model into `weights`.

        taken: the numbers of the samples (`take`) that the gradient was computed from.
        dtype: what the gradient's bytes are: float32, bfloat16 or float16.
        """
        self._say(Ready(granted.iteration, self.version, batch_size, compute_seconds, loss, tuple(taken)))
        if not self.welcome.gated or self._await_turn(granted.iteration):
            push = Push(granted.iteration, tuple(rates), dtype)
            self._on_all(lambda part: part.push(push, gradient))
        return self.go_on(weights)

    def go_on(self, weights: memoryview) -> Granted:
        """Wait for the next Grant, and pull the model into `weights`."""
        while not isinstance(message := self._hear(), Granted):
            pass
        pull = Pull(message.version)
        self.version = min(self._on_all(lambda part: part.pull(pull, weights)))
        return message

    def take(self, count: int, size: int, epochs: int) -> Given:
        """Samples to train on, now or later; an empty range when there are no more."""
        self._taken += 1
        self._say(Want(self._taken, count, size, epochs))
        while not isinstance(message := self._hear_next(), Given):
            self._later.append(message)
        return message

    def close(self) -> None:
        """Leave the job."""
        if not self._over.is_set():
            self._over.set()
            with contextlib.suppress(OSError):
                self._say(Leave())
                # To close with something unread would reset the connection, and the Leave could be lost.
                self._control.finish()
                self._listener.join(PARTING)
        self._hang_up()
        self._threads.shutdown(wait=False)

    def _join(self, description: bytes, token: bytes, worker: int | None) -> Welcome:
        greeting.call(self._control, token)
        self._control.send(Join(worker), memoryview(description))
        welcome = self._control.receive()
        if isinstance(welcome, Refused):
            raise Refusal(welcome.reason)
        if not isinstance(welcome, Welcome):
            raise WireError(f"The server answered with {type(welcome).__name__} instead of Welcome.")
        hello = Hello(welcome.worker, welcome.incarnation)
        for host, port, start, stop in welcome.shards:
            self._parts.append(_Part((host, port), start, stop, token, hello))
        return welcome

    def _hang_up(self) -> None:
        for part in self._parts:
            part.close()
        self._control.close()

    def _await_turn(self, iteration: int) -> bool:
        """True when it is our turn; False if the iteration was cancelled."""
        while True:
            message = self._hear()
            if isinstance(message, Turned | Cancelled) and message.iteration == iteration:
                return isinstance(message, Turned)

    def _on_all(self, do: Callable[[_Part], Any]) -> list[Any]:
        """Do the same with every shard, side by side."""
        if len(self._parts) == 1:
            return [do(self._parts[0])]
        return list(self._threads.map(do, self._parts))

    def _hear(self) -> Any:
        return self._later.popleft() if self._later else self._hear_next()

    def _hear_next(self) -> Any:
        message = self._heard.get()
        if isinstance(message, BaseException):
            raise message
        if isinstance(message, Refused):
            raise Refusal(message.reason)
        return message

    def _listen(self) -> None:
        try:
            while True:
                self._heard.put(self._control.receive())
        except (ConnectionError, OSError) as error:
            if not self._over.is_set():
                self._heard.put(WireError(f"The connection to the server is lost: {error}"))

    def _beat(self) -> None:
        while not self._over.wait(self.welcome.lease / 3):
            try:
                self._say(Beat())
            except OSError:
                return

    def _say(self, message: Any) -> None:
        with self._sending:
            self._control.send(message)
