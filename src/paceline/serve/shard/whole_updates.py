"""Whole updates: a shard holds each update until the log decides on it, and a pull never sees half of one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.serve.shard.admission import AdmittedTransfer
from paceline.serve.shard.pulls import PullServer
from paceline.serve.shard.recording import Recording
from paceline.serve.shard.store import HeldUpdate, WholeStore
from paceline.serve.shard.updates import Updates
from paceline.serve.wire.frames import Channel
from paceline.serve.wire.messages import (
    AddToSum,
    ApplyUpdates,
    DropUpdate,
    Hello,
    Identity,
    Pull,
    Setup,
    UpdateProducts,
    UpdateReceived,
)

if TYPE_CHECKING:
    from paceline.serve.shard.worker_connection import WorkerConnection


class WholeUpdates(Updates):
    """Applies an update when all of it has arrived, in the order of the log."""

    full_duplex = False
    store: WholeStore

    def __init__(
        self, store: WholeStore, state: threading.Condition, tell: Callable[[Any], None], pulls: PullServer
    ) -> None:
        super().__init__(store, state, tell)
        self.pulls = pulls
        self._recording: Recording | None = None
        self._transfers: dict[Identity, AdmittedTransfer] = {}  # of updates that are not added to a sum yet

    def connected(self, connection: WorkerConnection, hello: Hello) -> None:
        pass  # a push is answered over the connection that it came over

    def disconnected(self, channel: Channel, hello: Hello) -> None:
        pass

    def receive(self, update: Identity, piece: int, held: HeldUpdate, transfer: AdmittedTransfer | None) -> bool:
        if self.measures:
            held = held._replace(size=(*self.store.slice.squares(held.gradient), max(held.rates)))
        with self._state:
            is_new = self.store.put(update, held)
            if transfer and is_new:
                self._transfers[update] = transfer
            elif transfer:
                transfer.leave()
            reports = is_new and not self.follows
        if reports:
            self._tell(UpdateReceived(update, held.size))
        return True

    def pull(self, connection: WorkerConnection, request: Pull) -> None:
        self.pulls.send(connection, request)

    def record(self, path: Path, setup: Setup, description: bytes) -> None:
        self._recording = Recording(path, setup, description, self.store)

    def begin(self, version: int, part: bytes | None = None) -> None:
        super().begin(version)
        if self._recording:
            self._recording.begin(part)

    def carry_out(self, order: Any) -> None:
        if self._recording:
            self._recording.order(order)
        if isinstance(order, ApplyUpdates):
            self._apply(order)
            return
        with self._state:
            self.store.carry_out(order)
            if isinstance(order, AddToSum | DropUpdate) and (transfer := self._transfers.pop(order.update, None)):
                transfer.leave()

    def close(self) -> None:
        if self._recording:
            self._recording.close()

    def _await_quiet(self) -> None:
        while self.pulls.is_paused:
            self._state.wait(1.0)

    def _apply(self, order: ApplyUpdates) -> None:
        self.pulls.pause()
        self.store.apply(order)
        with self._state:
            self.store.applied(order)
            self.pulls.resume()
        if found := self.store.products:
            self._tell(UpdateProducts(order.version, found.with_whole, found.with_itself, found.whole))
