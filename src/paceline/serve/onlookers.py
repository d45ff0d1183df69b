"""Those who watch a job from outside: they subscribe, and are sent every trace event from then on."""

from __future__ import annotations

from paceline.observe.events import Began, Event, as_line
from paceline.serve.messages import Happened
from paceline.serve.peer import Peer


class Onlookers:
    """Everybody who has subscribed."""

    def __init__(self) -> None:
        self._peers: set[Peer] = set()

    def broadcast(self, event: Event) -> None:
        if self._peers:
            happened = Happened(as_line(event))
            for peer in self._peers:
                peer.send(happened)

    async def serve(self, peer: Peer, began: Began) -> None:
        """Send everything that happens, first a Began, until the subscriber goes."""
        peer.send(Happened(as_line(began)))
        self._peers.add(peer)
        try:
            while True:
                await peer.receive()  # it has nothing to say; this ends when it goes
        finally:
            self._peers.discard(peer)
