"""Those who watch a job from outside: they subscribe, and are sent every trace event from then on."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.observe.trace import Event, as_line
from paceline.serve.wire.async_channel import Peer
from paceline.serve.wire.messages import Happened


class Onlookers:
    """Everybody who has subscribed."""

    def __init__(self) -> None:
        self._peers: set[Peer] = set()

    def broadcast(self, event: Event) -> None:
        if self._peers:
            happened = Happened(as_line(event))
            for peer in self._peers:
                peer.send(happened)

    async def serve(self, peer: Peer, so_far: Iterable[Event]) -> None:
        """Send how things stand, and then everything that happens, until the subscriber goes."""
        for event in so_far:
            peer.send(Happened(as_line(event)))
        self._peers.add(peer)
        try:
            while True:
                await peer.receive()  # it has nothing to say; this ends when it goes
        finally:
            self._peers.discard(peer)
