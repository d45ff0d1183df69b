"""Subscribers watch a job from outside: the coordinator sends them every trace event."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.observe.trace import Event, as_line
from paceline.serve.wire.async_channel import AsyncChannel
from paceline.serve.wire.messages import TraceLine


class Subscribers:
    """The connections of all subscribers."""

    def __init__(self) -> None:
        self._peers: set[AsyncChannel] = set()

    def broadcast(self, event: Event) -> None:
        """Send a trace event to all subscribers."""
        if self._peers:
            line = TraceLine(as_line(event))
            for peer in self._peers:
                peer.send(line)

    async def serve(self, peer: AsyncChannel, present: Iterable[Event]) -> None:
        """Send the events that describe the present state, and then every new event, until the subscriber hangs up."""
        for event in present:
            peer.send(TraceLine(as_line(event)))
        self._peers.add(peer)
        try:
            while True:
                await peer.receive()  # a subscriber sends nothing more; this raises when it hangs up
        finally:
            self._peers.discard(peer)
