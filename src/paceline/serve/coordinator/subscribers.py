"""Those who watch a job from outside: they subscribe, and are sent every trace event from then on."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.observe.trace import Event, as_line
from paceline.serve.wire.async_channel import AsyncChannel
from paceline.serve.wire.messages import TraceLine


class Subscribers:
    """Everybody who has subscribed."""

    def __init__(self) -> None:
        self._peers: set[AsyncChannel] = set()

    def broadcast(self, event: Event) -> None:
        if self._peers:
            happened = TraceLine(as_line(event))
            for peer in self._peers:
                peer.send(happened)

    async def serve(self, peer: AsyncChannel, so_far: Iterable[Event]) -> None:
        """Send how things stand, and then everything that happens, until the subscriber goes."""
        for event in so_far:
            peer.send(TraceLine(as_line(event)))
        self._peers.add(peer)
        try:
            while True:
                await peer.receive()  # it has nothing to say; this ends when it goes
        finally:
            self._peers.discard(peer)
