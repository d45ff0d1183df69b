"""A session that outlives its connection: each side numbers its messages, and keeps those that may be lost.

Messages are numbered by counting them, so a number needs no place on the wire. Each side tells the other how many
messages it has received. When a connection is replaced by a new one, each side sends again what the other has not
received. So every message arrives once, and in order.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from paceline.serve.wire.frames import WireError


class Outbox:
    """The messages that were sent to a peer, as long as the peer has not acknowledged them."""

    def __init__(self) -> None:
        self.sent = 0  # messages so far, acknowledged or not
        self._kept: deque[tuple[Any, bytes]] = deque()  # the last ones, each with its body

    def add(self, message: Any, body: bytes = b"") -> None:
        """Number a message, and keep it until it is acknowledged. The caller sends it."""
        self.sent += 1
        self._kept.append((message, body))

    def acknowledge(self, received: int) -> None:
        """Forget the first `received` messages, which the peer has. Raise WireError if there are not so many.

        A number below an earlier one is late, and changes nothing.
        """
        if received > self.sent:
            raise WireError(f"The peer says that it has {received} messages, but only {self.sent} were sent to it.")
        while self._kept and self.sent - len(self._kept) < received:
            self._kept.popleft()

    def unacknowledged(self) -> list[tuple[Any, bytes]]:
        """Return the messages to send again over a new connection, each with its body."""
        return list(self._kept)
