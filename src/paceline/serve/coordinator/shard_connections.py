"""The shards, as the coordinator sees them: a connection to each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from paceline import policies
from paceline.job import events
from paceline.serve.coordinator.comparison import Comparison
from paceline.serve.wire.async_channel import AsyncChannel
from paceline.serve.wire.frames import WireError
from paceline.serve.wire.messages import (
    CheckpointLoaded,
    Heartbeat,
    InitialWeightsReceived,
    PartSaved,
    PeerRejected,
    Register,
    ShardFailed,
    UpdateProducts,
    UpdateReceived,
)

log = logging.getLogger(__name__)


class ShardConnections:
    """All shards of one generation. When one is lost, the generation has failed."""

    def __init__(self, count: int, tell: Callable[[events.Event], None], lost: Callable[[str], None]) -> None:
        """tell: takes an event. lost: is told why a shard is lost, or cannot work."""
        self._count, self._tell, self._lost = count, tell, lost
        self.addresses: dict[int, tuple[str, int]] = {}  # host ("": as the coordinator's) and port
        self.complete = asyncio.Event()  # all are there
        self.hopeless = False  # would a new generation fail in the same way?
        self.faults = 0  # workers that they have turned away
        self._peers: dict[int, AsyncChannel] = {}
        self._comparing: dict[int, Comparison] = {}  # version → what shards have said of its updates so far
        self.closing = False
        if not count:
            self.complete.set()

    def send(self, message: Any) -> None:
        """Send a message to all."""
        for peer in self._peers.values():
            peer.send(message)

    def send_to(self, shard: int, message: Any, body: bytes = b"") -> None:
        self._peers[shard].send(message, body)

    def expect_comparison(self, version: int, apply: policies.Apply) -> None:
        """All will compare the updates of this Apply."""
        if self._peers:
            self._comparing[version] = Comparison(apply)

    async def serve(self, peer: AsyncChannel, first: Register, set_up: Callable[[], None]) -> None:
        """Listen to a shard until it is gone. set_up: is called when all are there."""
        shard = first.shard
        if shard in self._peers or not 0 <= shard < self._count:
            raise WireError(f"There is a shard {shard} already, or none is wanted.")
        self._peers[shard] = peer
        self.addresses[shard] = ("" if _is_loopback(peer.host) else peer.host, first.port)
        self._tell(events.ShardAlive(shard))
        if len(self._peers) == self._count:
            set_up()
            self.complete.set()
        try:
            while True:
                self._hear(shard, await peer.receive())
        finally:
            if not self.closing:
                self._lost(f"Shard {shard} is lost.")

    def _hear(self, shard: int, message: Any) -> None:
        match message:
            case Heartbeat():
                self._tell(events.ShardAlive(shard))
            case UpdateReceived(update):
                self._tell(events.UpdateArrived(shard, *update))
            case CheckpointLoaded():
                self._tell(events.ShardLoaded(shard))
            case InitialWeightsReceived(worker, incarnation):
                self._tell(events.ShardInitialized(shard, worker, incarnation))
            case UpdateProducts():
                self._compared(message)
            case PartSaved(version, error):
                self._tell(events.ShardSaved(shard, version, error))
            case PeerRejected(reason):
                log.warning("shard %d turned a peer away: %s", shard, reason)
                self.faults += 1
            case ShardFailed(reason):
                self.hopeless = True
                self._lost(f"Shard {shard} cannot work: {reason}")
            case _:
                raise WireError(f"A {type(message).__name__} is out of place here.")

    def _compared(self, part: UpdateProducts) -> None:
        """Put together what shards say of the updates of an Apply. When all have, the job is told."""
        comparison = self._comparing.get(part.version)
        if comparison is None or not comparison.fits(part):
            raise WireError("What was compared is not what was asked for.")
        comparison.add(part)
        if comparison.parts == self._count:
            del self._comparing[part.version]
            self._tell(events.UpdatesCompared(comparison.updates, tuple(comparison.cosines())))


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")
