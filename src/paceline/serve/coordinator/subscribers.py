"""Subscribers watch a job from outside: the coordinator sends them every trace event."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from paceline.observe.trace import Event
from paceline.serve.wire.async_channel import AsyncChannel
from paceline.serve.wire.messages import TraceEvents
from paceline.serve.wire.packed_events import pack

#: Seconds for which events are collected. A small step has a dozen events. If each were a message of its own, the
#: subscriber and the coordinator would spend as much time on them as the workers spend on computing.
COLLECT_SECONDS = 0.05
MAX_BYTES = 1 << 14  # of events in one message


class Subscribers:
    """The connections of all subscribers."""

    def __init__(self) -> None:
        self._peers: set[AsyncChannel] = set()
        self._collected: list[tuple[str, bytes]] = []
        self._size = 0  # bytes of the collected events
        self._timer: asyncio.TimerHandle | None = None  # set while there are collected events

    def broadcast(self, event: Event) -> None:
        """Send a trace event to all subscribers soon."""
        if not self._peers:
            return
        packed = pack(event)
        size = len(packed[1])
        if self._size + size > MAX_BYTES:
            self.flush()
        self._collected.append(packed)
        self._size += size
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(COLLECT_SECONDS, self.flush)

    def flush(self) -> None:
        """Send the collected events now."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._collected:
            message = TraceEvents(tuple(self._collected))
            self._collected, self._size = [], 0
            for peer in self._peers:
                peer.send(message)

    async def serve(self, peer: AsyncChannel, present: Iterable[Event]) -> None:
        """Send the events that describe the present state, and then every new event, until the subscriber hangs up."""
        self.flush()  # the new subscriber knows these by the present state
        for event in present:
            peer.send(TraceEvents((pack(event),)))
        self._peers.add(peer)
        try:
            while True:
                await peer.receive()  # a subscriber sends nothing more; this raises when it hangs up
        finally:
            self._peers.discard(peer)
