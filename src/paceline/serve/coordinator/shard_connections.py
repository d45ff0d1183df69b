"""The coordinator's connections to the shards."""

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
    """The connections to all shards of one generation. If one shard is lost, the generation fails."""

    def __init__(self, count: int, tell: Callable[[events.Event], None], fail: Callable[[str], None]) -> None:
        """tell: called with each event. fail: called with a reason if a shard is lost or cannot be set up."""
        self._count, self._tell, self._fail = count, tell, fail
        self.addresses: dict[int, tuple[str, int]] = {}  # host ("": the coordinator's) and port
        self.complete = asyncio.Event()  # all shards have registered
        self.failure_is_permanent = False  # would a new generation fail in the same way?
        self.faults = 0  # peers that the shards refused
        self._peers: dict[int, AsyncChannel] = {}
        self._comparing: dict[int, Comparison] = {}  # version → the products received so far
        self.closing = False
        if not count:
            self.complete.set()

    def send(self, message: Any) -> None:
        """Send a message to all shards."""
        for peer in self._peers.values():
            peer.send(message)

    def send_to(self, shard: int, message: Any, body: bytes = b"") -> None:
        """Send a message to one shard."""
        self._peers[shard].send(message, body)

    def expect_comparison(self, version: int, apply: policies.Apply) -> None:
        """Prepare for the UpdateProducts that all shards will send for this Apply."""
        if self._peers:
            self._comparing[version] = Comparison(apply)

    async def serve(self, peer: AsyncChannel, first: Register, set_up: Callable[[], None]) -> None:
        """Handle the messages of a shard until its connection ends. set_up: called when all shards have registered."""
        shard = first.shard
        if shard in self._peers or not 0 <= shard < self._count:
            raise WireError(f"Shard {shard} is registered already, or its number is not below {self._count}.")
        self._peers[shard] = peer
        self.addresses[shard] = ("" if _is_loopback(peer.host) else peer.host, first.port)
        self._tell(events.ShardAlive(shard))
        if len(self._peers) == self._count:
            set_up()
            self.complete.set()
        try:
            while True:
                self._handle(shard, await peer.receive())
        finally:
            if not self.closing:
                self._fail(f"Shard {shard} is lost.")

    def _handle(self, shard: int, message: Any) -> None:
        """Handle one message of a shard."""
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
                self._add_products(message)
            case PartSaved(version, error):
                self._tell(events.ShardSaved(shard, version, error))
            case PeerRejected(reason):
                log.warning("shard %d refused a peer: %s", shard, reason)
                self.faults += 1
            case ShardFailed(reason):
                self.failure_is_permanent = True
                self._fail(f"Shard {shard} cannot be set up: {reason}")
            case _:
                raise WireError(f"A {type(message).__name__} is not expected here.")

    def _add_products(self, part: UpdateProducts) -> None:
        """Add one shard's products to its comparison. Tell the job the cosines when all shards have sent theirs."""
        comparison = self._comparing.get(part.version)
        if comparison is None or not comparison.fits(part):
            raise WireError(f"UpdateProducts for version {part.version} do not match an ApplyUpdates with `compare`.")
        comparison.add(part)
        if comparison.parts == self._count:
            del self._comparing[part.version]
            self._tell(events.UpdatesCompared(comparison.updates, tuple(comparison.cosines())))


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")
