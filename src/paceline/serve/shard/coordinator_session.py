"""A shard's session with the coordinator. It outlives the connection: a lost connection is replaced by a new one.

Nothing is lost with a connection. Orders and reports are numbered, and those that the other side has not received are
sent again (`wire/outbox.py`). So a shard carries out each order once, in the order of the log.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.frames import Channel, ConnectionClosed, MessageDecoder, WireError
from paceline.serve.wire.messages import (
    ANY_NUMBER,
    Accepted,
    AddToSum,
    ApplyUpdates,
    Challenge,
    ContinueAlone,
    DropUpdate,
    Fence,
    InitialWeightsFrom,
    KeepUpdate,
    PeerRejected,
    Refused,
    Register,
    Registered,
    SavePart,
    Setup,
    ShardHeartbeat,
    Stop,
    StreamUpdates,
    TakeOver,
)
from paceline.serve.wire.outbox import Outbox

log = logging.getLogger(__name__)

FROM_COORDINATOR = MessageDecoder(
    Challenge
    | Accepted
    | Refused
    | Registered
    | ShardHeartbeat
    | Setup
    | InitialWeightsFrom
    | AddToSum
    | ApplyUpdates
    | StreamUpdates
    | DropUpdate
    | KeepUpdate
    | Fence
    | SavePart
    | ContinueAlone
    | TakeOver
    | Stop
)
HEARTBEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0  # without an answer to a heartbeat, after which the connection counts as lost
RETURN_SECONDS = 60.0  # for which a shard tries to return to its coordinator
REFUSED_SECONDS = 1.0  # for which nobody may listen at the coordinator's address; then the coordinator is gone
ANSWER_SECONDS = 10.0  # for the answer to Register
CUT_SECONDS = 5.0  # for which a first connection is tried again that was cut in the handshake
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0  # seconds between two attempts to connect


class ShardRefused(WireError):
    """The coordinator refuses this shard. The message is its reason."""


class CoordinatorSession:
    """The messages between a shard and its coordinator, in one generation of the server.

    One thread receives. Any thread may send.
    """

    def __init__(self, endpoint: Endpoint, certificate: bytes = b"") -> None:
        """Open the first connection. Raise OSError if that fails.

        certificate: the digest of the certificate that the shard shows workers.
        """
        self._endpoint, self._certificate = endpoint, certificate
        self._channel, self.generation = _open_first(endpoint)
        self._secret = secrets.token_bytes(16)
        self._shard = self._replica = self._port = 0
        self._outbox = Outbox()
        self._received = 0  # orders, over all connections
        self._sending = threading.Lock()  # held while a message is numbered and sent
        self._closed = threading.Event()

    def begin(self, shard: int, replica: int, port: int) -> int:
        """Register the shard, and send heartbeats from now on. Return the number of the shard.

        shard: its number, or ANY_NUMBER. port: where the shard listens for workers.
        """
        self._shard, self._replica, self._port = shard, replica, port
        try:
            self._register(self._channel)
        except WireError:  # the coordinator refuses this shard
            raise
        except OSError as error:
            self._return(error)
        threading.Thread(target=self._send_heartbeats, daemon=True).start()
        return self._shard

    def tell(self, message: Any) -> None:
        """Send a message to the coordinator once. It waits while there is no connection.

        A PeerRejected is not kept, because strangers could fill the memory with them.
        """
        with self._sending:
            if not isinstance(message, PeerRejected):
                self._outbox.add(message)
            self._send(message)

    def receive(self, into: Callable[[Any, int], memoryview]) -> Any:
        """Return the next order. into: as for `Channel.receive`.

        If the connection is lost, replace it. Raise ShardRefused if the coordinator refuses this shard, and another
        OSError if the coordinator is gone.
        """
        while True:
            try:
                message = self._channel.receive(into)
            except WireError:
                raise
            except OSError as error:
                self._return(error)
                continue
            if isinstance(message, Refused):
                raise ShardRefused(message.reason)
            if isinstance(message, ShardHeartbeat):
                with self._sending:
                    self._outbox.acknowledge(message.received)
                continue
            self._received += 1
            return message

    def close(self) -> None:
        """End the session."""
        self._closed.set()
        self._channel.close()

    def _send(self, message: Any) -> None:
        """Send a message over the present connection, if it still holds. The lock is held."""
        try:
            self._channel.send(message)
        except OSError:
            self._channel.cut()  # the receiving thread notices, and opens a new connection

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(HEARTBEAT_SECONDS):
            with self._sending:
                self._send(ShardHeartbeat(self._received))

    def _return(self, lost: OSError) -> None:
        """Open a new connection to the same coordinator. Raise OSError if the coordinator is gone."""
        log.info("the connection to the coordinator is lost: %s", lost)
        self._channel.close()
        began, pause = time.monotonic(), FIRST_PAUSE
        refused_since: float | None = None
        while True:
            channel: Channel | None = None
            try:
                channel, generation = self._endpoint.open(FROM_COORDINATOR)
                if generation != self.generation:
                    raise ConnectionClosed("The coordinator is of another generation.")
                self._register(channel)
                return
            except OSError as error:
                if channel:
                    channel.close()
                if isinstance(error, WireError) or (channel and generation != self.generation):
                    raise
                now = time.monotonic()
                refused_since = (refused_since or now) if isinstance(error, ConnectionRefusedError) else None
                is_gone = refused_since is not None and now - refused_since > REFUSED_SECONDS
                if is_gone or now - began > RETURN_SECONDS or self._closed.is_set():
                    raise
            self._closed.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _register(self, channel: Channel) -> None:
        """Register over a new connection, send again what the coordinator has not received, and use the connection."""
        channel.limit_silence(SILENT_SECONDS)
        place, received = (self._shard, self._port), (self._received, self._replica)
        channel.send(Register(*place, self._secret, self.generation, *received, self._certificate))
        with channel.within(ANSWER_SECONDS):
            answer = channel.receive()
        if isinstance(answer, Refused):
            raise ShardRefused(answer.reason)
        if not isinstance(answer, Registered):
            raise WireError(f"The coordinator answered with {type(answer).__name__} instead of Registered.")
        channel.limit_silence(SILENT_SECONDS)
        if self._shard == ANY_NUMBER:
            self._shard = answer.shard
        with self._sending:
            self._outbox.acknowledge(answer.received)
            self._channel = channel
            for message, _ in self._outbox.unacknowledged():
                channel.send(message)


def _open_first(endpoint: Endpoint) -> tuple[Channel, str]:
    """Open a shard's first connection, again if it is cut in the handshake. Return it and the server's generation."""
    until, pause = time.monotonic() + CUT_SECONDS, FIRST_PAUSE
    while True:
        try:
            return endpoint.open(FROM_COORDINATOR)
        except (ConnectionClosed, ConnectionResetError, BrokenPipeError):
            if time.monotonic() > until:
                raise
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
