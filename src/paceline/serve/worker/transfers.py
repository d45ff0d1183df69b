"""What a worker sends to its shards and gets from them: first weights, gradients, the model.

A connection to a shard that is lost is opened again, and the push or pull on it is done again, which the shard bears.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from paceline.model.half_precision import WIDTH
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.frames import Channel, MessageDecoder, WireError
from paceline.serve.wire.messages import (
    Accepted,
    AllowPush,
    Challenge,
    Expelled,
    Hello,
    InitialWeights,
    InitialWeightsReceived,
    Pull,
    Push,
    PushReceived,
    Refused,
    RequestPush,
    UpdatedPiece,
    Weights,
    Welcome,
)
from paceline.serve.worker.streamed_exchange import Backward, ShardLink, StreamedExchange, push_order

FROM_SHARD = MessageDecoder(
    Challenge
    | Accepted
    | Refused
    | Expelled
    | InitialWeightsReceived
    | AllowPush
    | PushReceived
    | UpdatedPiece
    | Weights
)
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds between attempts to connect


class Refusal(ConnectionError):
    """The server does not want this worker; the message says why."""


class IncarnationOver(ConnectionError):
    """This incarnation is over; the worker may join again."""


def raise_if_over(message: Any) -> None:
    """Raise if an answer is the end of it."""
    if isinstance(message, Refused):
        raise Refusal(message.reason)
    if isinstance(message, Expelled):
        raise IncarnationOver(message.reason)


def retry_pauses(seconds: float) -> Iterator[float]:
    """Pauses between attempts, longer and longer, for so many seconds in all."""
    end, pause = time.monotonic() + seconds, FIRST_PAUSE
    while (left := end - time.monotonic()) > 0:
        yield min(pause, left)
        pause = min(2 * pause, LONGEST_PAUSE)


class Ending:
    """Whether an incarnation has ended, and why."""

    def __init__(self) -> None:
        self.error: ConnectionError | None = None
        self.over = threading.Event()  # set when it ends, or is about to

    def check(self) -> None:
        """Raise its error if it has ended."""
        if self.error:
            raise self.error


class Transfers:
    """One incarnation's connections to the shards."""

    def __init__(self, endpoint: Endpoint, welcome: Welcome, generation: str, patience: float, ending: Ending) -> None:
        """patience: seconds for which a shard that cannot be reached is called again."""
        self._welcome, self._generation = welcome, generation
        self._patience, self._ending = patience, ending
        shards = enumerate(welcome.shards)
        self.parts = [ShardLink(number, endpoint.at(host, port), pieces) for number, (host, port, pieces) in shards]
        self._threads = ThreadPoolExecutor(max(1, len(self.parts)), thread_name_prefix="paceline")

    def close(self) -> None:
        """Hang up; whatever waits here wakes."""
        for part in self.parts:
            part.hang_up()
        self._threads.shutdown(wait=False)

    def begin(self, weights: memoryview) -> None:
        """Give the shards the weights that the model begins with."""

        def give(part: ShardLink) -> None:
            for piece in range(len(part.pieces)):
                self._ask(part, InitialWeights(piece), part.piece(weights, piece))

        self._on_all(give)

    def push(self, push: Push, gradient: memoryview) -> None:
        """Push a gradient to all shards."""
        may = RequestPush() if self._welcome.asks else None
        width = WIDTH[push.dtype]
        self._on_all(lambda part: self._ask(part, push, part.piece(gradient, 0, width), may))

    def pull(self, version: int, weights: memoryview, expected: int | None = None) -> int:
        """Pull this version or a newer one, the same from all shards: half an update is never seen. The version.

        expected: as it will be so many versions later. None: as it is, and so it must be where it is the last.

        A shard may have gone on while another was asked. It is seldom, as all are asked at once; then all are asked
        again: one alone, asked later, would be ahead of the others.
        """
        for part in self.parts:
            part.version = -1
        asked = Pull(version, expected)
        while any(part.version < version for part in self.parts):
            self._on_all(partial(self._pull, asked, weights))  # all at once, so that they agree
            version = max(part.version for part in self.parts)
            if expected is not None:  # of the versions that are to follow, these have
                expected = max(0, expected - (version - asked.version))
            asked = Pull(version, expected)
        return version

    def stream(
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
        exchange = StreamedExchange(
            lambda piece: Push(iteration, rates, dtype, piece), gradient, WIDTH[dtype], weights, raise_if_over
        )
        try:
            coming = [self._threads.submit(self._with, part, partial(exchange.receive, part)) for part in self.parts]
        except RuntimeError:  # shut down meanwhile
            raise self._ending.error or WireError("This worker has left.") from None
        last: ShardLink | None = None
        for part, piece in push_order(self.parts, self._welcome.worker, from_the_end=backward is not None):
            if last is not None and last is not part and not backward:
                exchange.drain(last)
            last = part
            if backward:
                backward.wait(part.pieces[piece][0])
            self._ending.check()
            exchange.send(part, piece)
        computed()
        for each in coming:
            each.result()

    def await_first_piece(self, backward: Backward) -> None:
        """Until the piece that is pushed first is computed: a turn that comes too early is time that others wait."""
        if self.parts:
            part, piece = push_order(self.parts, self._welcome.worker, from_the_end=True)[0]
            backward.wait(part.pieces[piece][0])

    def _ask(self, part: ShardLink, message: Any, body: memoryview, may: RequestPush | None = None) -> None:
        """Send it, and again until it is answered. `may`: ask first."""

        def do(channel: Channel) -> None:
            if may:
                channel.send(may)
                raise_if_over(channel.receive())
            channel.send(message, body)
            raise_if_over(channel.receive())

        self._with(part, do)

    def _pull(self, pull: Pull, weights: memoryview, part: ShardLink) -> None:
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
                raise_if_over(answer)
                left -= not isinstance(answer, UpdatedPiece)  # of a push that was sent twice
            return int(answer.version)

        part.version = self._with(part, do)

    def _with(self, part: ShardLink, do: Callable[[Channel], Any]) -> Any:
        """Do something with a shard, and again on a new connection when the old one is lost."""
        pauses: Iterator[float] | None = None  # from the first failure on: a transfer may itself take long
        while True:
            self._ending.check()
            try:
                if part.channel is None:
                    part.channel = self._connect(part)
                    if self._ending.error:  # meanwhile: whoever ended it may have hung up before this was there
                        part.hang_up()
                        raise self._ending.error
                return do(part.channel)
            except (Refusal, IncarnationOver):
                raise
            except OSError as error:
                part.hang_up()
                pauses = pauses or retry_pauses(self._patience)
                pause = next(pauses, None)
                if pause is None and not self._ending.error:
                    where = f"{part.endpoint.host}:{part.endpoint.port}"
                    raise WireError(f"The shard at {where} cannot be reached any more: {error}.") from None
                self._ending.over.wait(pause or 0.0)

    def _connect(self, part: ShardLink) -> Channel:
        channel, generation = part.endpoint.open(FROM_SHARD)
        if generation != self._generation:
            channel.close()
            raise IncarnationOver("The server is of another generation.")
        lease = self._welcome.lease
        channel.limit_cut(max(1.0, lease))
        channel.limit_silence(lease)  # a shard answers at once, or its answer was lost on the way
        try:
            channel.send(Hello(self._welcome.worker, self._welcome.incarnation, self._welcome.ticket))
        except OSError:
            channel.close()
            raise
        return channel

    def _on_all(self, do: Callable[[ShardLink], Any]) -> list[Any]:
        """Do the same with every shard, side by side."""
        if len(self.parts) == 1:
            return [do(self.parts[0])]
        try:
            return list(self._threads.map(do, self.parts))
        except RuntimeError:  # shut down meanwhile
            raise self._ending.error or WireError("This worker has left.") from None
