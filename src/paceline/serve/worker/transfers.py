"""The transfers between a worker and its shards: the initial weights, gradients and the model.

A worker that loses its connection to a shard opens a new one and repeats the push or the pull. The shard accepts the
repetition and applies the update once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from paceline.model.description import Description
from paceline.model.differences import way_back
from paceline.serve.wire.endpoint import Endpoint, is_loopback
from paceline.serve.wire.frames import Channel, ConnectionClosed, MessageDecoder, WireError
from paceline.serve.wire.link import worker_to_shard
from paceline.serve.wire.messages import (
    Accepted,
    AllowPush,
    Challenge,
    Expelled,
    Hello,
    InitialState,
    InitialWeights,
    InitialWeightsReceived,
    OptimizerState,
    Pull,
    PullState,
    PushReceived,
    Ranges,
    Refused,
    RequestPush,
    ShardMoved,
    UpdatedPiece,
    Weights,
    Welcome,
)
from paceline.serve.wire.tls import TlsRefused
from paceline.serve.wire.transfer_messages import NEARLY_DONE
from paceline.serve.worker.endings import Ending, IncarnationOver, Refusal, raise_if_over, retry_pauses
from paceline.serve.worker.gradient import Backward, OutgoingGradient
from paceline.serve.worker.push_to_all import push_order, push_to_all
from paceline.serve.worker.shard_link import ShardLink
from paceline.serve.worker.streamed_exchange import StreamedExchange
from paceline.serve.worker.visited_push import VisitedPush

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
    | OptimizerState
)
#: Makes a shard's part of a checkpoint from the shard's pieces of the model.
PartOf = Callable[[Ranges], bytes]
MOVED_SECONDS = 0.1  # after which a thread that waits for a shard looks whether the incarnation has ended


class Transfers:
    """The connections of one incarnation to the shards."""

    def __init__(
        self,
        endpoint: Endpoint,
        welcome: Welcome,
        generation: str,
        patience: float,
        ending: Ending,
        description: bytes = b"",
    ) -> None:
        """patience: seconds for which the worker retries to reach a shard.

        description: of the model, as JSON. It is needed if the job has a codec.
        """
        self._welcome, self._generation, self._endpoint = welcome, generation, endpoint
        self.patience, self._ending = patience, ending
        digests = welcome.certificates or (b"",) * len(welcome.shards)
        shards = enumerate(zip(welcome.shards, digests, strict=True))
        codec = "" if welcome.mixes else way_back(welcome.update_codec)
        trained = Description.from_json(description).layout.trained_elements if codec else 0
        self.parts = [
            ShardLink(number, endpoint.at(host, port, digest), pieces, codec, trained)
            for number, ((host, port, pieces), digest) in shards
        ]
        self._threads = ThreadPoolExecutor(max(1, len(self.parts)), thread_name_prefix="paceline")

    def close(self) -> None:
        """Close all connections. A thread that waits for a shard wakes with an error."""
        for shard in self.parts:
            shard.hang_up()
        self._threads.shutdown(wait=False)

    def move(self, moved: ShardMoved) -> None:
        """Use the new address of a shard whose backup has taken over. What it has not answered is repeated there."""
        endpoint = self._endpoint.at(moved.host, moved.port, moved.certificate)
        if 0 <= moved.shard < len(self.parts) and self.parts[moved.shard].endpoint != endpoint:
            self.parts[moved.shard].move(endpoint)

    def send_initial_weights(self, weights: memoryview, part_of: PartOf | None = None) -> None:
        """Send the initial weights of the model to the shards, with the optimizer's state if `part_of` is given."""

        def send(shard: ShardLink) -> None:
            if part_of:
                self._send(shard, InitialState(), memoryview(part_of(shard.pieces)))
                return
            for piece in range(len(shard.pieces)):
                self._send(shard, InitialWeights(piece), shard.piece_of(weights, piece))

        self._on_all_shards(send)

    def pull_state(self) -> list[bytes]:
        """Return each shard's part of the optimizer's state."""
        parts: dict[int, bytearray] = {}

        def pull(shard: ShardLink) -> None:
            def place(message: Any, size: int) -> memoryview | None:
                if not isinstance(message, OptimizerState):
                    return None
                parts[shard.number] = bytearray(size)
                return memoryview(parts[shard.number])

            def ask(channel: Channel) -> None:
                channel.send(PullState())
                while not isinstance(answer := shard.receive(channel, place), OptimizerState):
                    raise_if_over(answer)  # or the late answer to a piece that was pushed twice

            self._with_channel(shard, ask)

        self._on_all_shards(pull)
        return [bytes(parts[number]) for number in sorted(parts)]

    def push(self, iteration: int, gradient: OutgoingGradient) -> None:
        """Push a whole gradient to all shards."""
        push = gradient.push(iteration)

        def send(shard: ShardLink) -> None:
            piece = gradient.body(*shard.pieces[0])
            self._send(shard, push, piece, ask_first=self._welcome.asks and self._shares_link(shard, len(piece)))

        self._on_all_shards(send)

    def pull(self, version: int, weights: memoryview, expected: int | None = None, exact: bool = False) -> int:
        """Pull this version of the model or a newer one, the same from all shards. Return the version.

        The weights never hold half an update.
        expected: pull the weights as predicted for this number of versions later. None: pull them as they are.
        exact: pull them in float32, even if this job encodes the model. The last pull of a job needs both.

        A shard may apply another update before it answers. This is rare, because all shards are asked at once. Then
        all of them are asked again: a single shard that is asked later could be ahead of the others.
        """
        for shard in self.parts:
            shard.version = -1
        request = Pull(version, expected, exact)
        while any(shard.version < version for shard in self.parts):
            self._on_all_shards(partial(self._pull, request, weights))
            version = max(shard.version for shard in self.parts)
            if expected is not None:  # versions that have been applied meanwhile need not be predicted
                expected = max(0, expected - (version - request.version))
            request = Pull(version, expected, exact)
        return version

    def stream(
        self,
        iteration: int,
        gradient: OutgoingGradient,
        weights: memoryview,
        parts: int = 0,
        next_visit: Callable[[], tuple[int, int] | None] | None = None,
        end_visit: Callable[[int, int], None] | None = None,
    ) -> list[Future[None]]:
        """Push a gradient piece by piece, and meanwhile receive updated pieces of the model into `weights`.

        Return when all pieces are sent. The futures, one for each shard, end when its updated pieces are received.
        next_visit: waits for the next visit (`job.visits`), and returns its shard and part, or None if the rest is to
        be pushed at once. parts: of each shard. end_visit: called at the end of each visit.
        """
        exchange = StreamedExchange(iteration, gradient, weights, raise_if_over)
        backward = gradient.backward
        try:
            receiving = [
                self._threads.submit(self._with_channel, shard, partial(exchange.receive, shard))
                for shard in self.parts
            ]
        except RuntimeError:  # the threads were shut down meanwhile
            raise self._ending.error or WireError("This worker has left.") from None
        if next_visit and end_visit:
            VisitedPush(self.parts, self._welcome.worker, parts, exchange).run(next_visit, end_visit)
            return receiving
        push_to_all(self.parts, self._welcome.worker, exchange, self._ending.check, backward)
        return receiving

    def await_first_piece(self, backward: Backward) -> None:
        """Wait until the piece that is pushed first is computed. Other workers would wait if the turn came earlier."""
        if self.parts:
            shard, piece = push_order(self.parts, self._welcome.worker, from_the_end=True)[0]
            backward.wait(shard.pieces[piece][0])

    def _send(self, shard: ShardLink, message: Any, body: memoryview, ask_first: bool = False) -> None:
        """Send a message until the shard has answered it. ask_first: ask for permission to push before."""

        def send(channel: Channel) -> None:
            if ask_first:
                channel.send(RequestPush())
                raise_if_over(channel.receive())
            channel.send(message, body)
            raise_if_over(channel.receive())

        self._with_channel(shard, send)

    def _shares_link(self, shard: ShardLink, size: int) -> bool:
        """Return whether a push of this size must take turns with others on a link.

        A short push need not, nor does a push to a shard on this machine, unless the link between them is emulated.
        """
        is_near = is_loopback(shard.endpoint.host) and worker_to_shard(self._welcome.worker, shard.number) is None
        return size > NEARLY_DONE and not is_near

    def _pull(self, request: Pull, weights: memoryview, shard: ShardLink) -> None:
        """Pull all pieces of one shard, and note the version that it answers with."""

        def place(message: Any, size: int) -> memoryview | None:
            return shard.piece_of(weights, message.piece) if isinstance(message, Weights) else None

        def pull(channel: Channel) -> int:
            channel.send(request)
            left = len(shard.pieces)
            while left:
                answer = shard.receive(channel, place)
                raise_if_over(answer)
                left -= not isinstance(answer, UpdatedPiece)  # late answer to a piece that was pushed twice
            return int(answer.version)

        shard.version = self._with_channel(shard, pull)

    def _with_channel(self, shard: ShardLink, use: Callable[[Channel], Any]) -> Any:
        """Call `use` with a connection to the shard, and again with a new connection each time one is lost."""
        pauses: Iterator[float] | None = None  # begin at the first failure, because a transfer itself may take long
        while True:
            self._ending.check()
            shard.moved.clear()
            endpoint = shard.endpoint
            try:
                if shard.channel is None:
                    shard.use(self._connect(shard))
                    if shard.endpoint != endpoint:  # it has moved meanwhile
                        raise ConnectionClosed("The shard has moved.")
                    if self._ending.error:  # `close` may have run before this connection existed
                        shard.hang_up()
                        raise self._ending.error
                assert shard.channel
                return use(shard.channel)
            except (Refusal, IncarnationOver, TlsRefused):
                raise
            except OSError as error:
                shard.hang_up()
                pauses = pauses or retry_pauses(self.patience)
                pause = next(pauses, None)
                if pause is None and not self._ending.error:
                    address = f"{shard.endpoint.host}:{shard.endpoint.port}"
                    raise WireError(f"The shard at {address} can no longer be reached: {error}.") from None
                self._pause(shard, pause or 0.0)

    def _pause(self, shard: ShardLink, seconds: float) -> None:
        """Wait until the shard has moved or the incarnation ends, but no longer than `seconds`."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._ending.over.is_set():
            if shard.moved.wait(min(left, MOVED_SECONDS)):
                return

    def _connect(self, shard: ShardLink) -> Channel:
        channel, generation = shard.endpoint.open(FROM_SHARD)
        if generation != self._generation:
            channel.close()
            raise IncarnationOver("The server is of another generation.")
        channel.emulate(worker_to_shard(self._welcome.worker, shard.number))
        lease = self._welcome.lease
        channel.set_keepalive(max(1.0, lease))
        channel.limit_silence(lease)  # a shard answers at once, unless its answer was lost on the way
        try:
            channel.send(Hello(self._welcome.worker, self._welcome.incarnation, self._welcome.ticket, shard.codec))
        except OSError:
            channel.close()
            raise
        return channel

    def _on_all_shards(self, do: Callable[[ShardLink], Any]) -> None:
        """Call `do` with every shard, in parallel."""
        if len(self.parts) == 1:
            do(self.parts[0])
            return
        try:
            list(self._threads.map(do, self.parts))
        except RuntimeError:  # the threads were shut down meanwhile
            raise self._ending.error or WireError("This worker has left.") from None
