"""The coordinator's session with one process of a shard. It outlives the connection.

Orders that the shard has not received are kept, and sent again over a new connection (`wire/outbox.py`).
"""

from __future__ import annotations

import hmac
import time
from typing import Any

from paceline.serve.wire.async_channel import AsyncChannel
from paceline.serve.wire.messages import PeerRejected, Register, Registered, ShardHeartbeat, Stop
from paceline.serve.wire.outbox import Outbox


class ShardSession:
    """The messages between the coordinator and one process of a shard."""

    def __init__(self, first: Register) -> None:
        self._secret = first.secret
        self._outbox = Outbox()
        self._received = 0  # messages of the shard, over all connections
        self._peer: AsyncChannel | None = None  # the present connection
        self._lost_at = 0.0  # when the last connection was lost, by time.monotonic

    @property
    def is_connected(self) -> bool:
        """Whether the shard has a connection now."""
        return self._peer is not None

    def is_missing(self, seconds: float) -> bool:
        """Return whether the shard has had no connection for so long."""
        return self._peer is None and time.monotonic() - self._lost_at >= seconds

    def is_of(self, register: Register) -> bool:
        """Return whether a Register comes from the process of this session."""
        return hmac.compare_digest(self._secret, register.secret)

    def send(self, message: Any, body: bytes = b"") -> None:
        """Send a message to the shard once. It waits while there is no connection."""
        self._outbox.add(message, body)
        if self._peer:
            self._peer.send(message, body)

    def end(self) -> None:
        """Stop the shard, if it can still be reached, and close its connection."""
        peer, self._peer = self._peer, None
        if peer:
            peer.send(Stop())
            peer.close()

    def connect(self, peer: AsyncChannel, register: Register) -> None:
        """Use a new connection in place of the old one, and send again what the shard has not received.

        Raise WireError if the shard says that it has received more than was sent.
        """
        self._outbox.acknowledge(register.received)
        if self._peer:
            self._peer.abort()
        self._peer = peer
        peer.send(Registered(self._received, register.shard))
        for message, body in self._outbox.unacknowledged():
            peer.send(message, body)

    async def receive(self, peer: AsyncChannel) -> Any:
        """Return the next message that the shard sends over this connection, or None if it has a new connection.

        Raise WireError if the shard breaks the protocol, and another error if the connection is lost.
        """
        try:
            message = await peer.receive()
        except BaseException:
            if self._peer is peer:
                self._peer, self._lost_at = None, time.monotonic()
            raise
        if self._peer is not peer:
            return None  # the shard sends the message again over its new connection
        if isinstance(message, ShardHeartbeat):
            self._outbox.acknowledge(message.received)
            peer.send(ShardHeartbeat(self._received))
        elif not isinstance(message, PeerRejected):
            self._received += 1
        return message
