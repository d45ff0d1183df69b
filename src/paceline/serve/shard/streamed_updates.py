"""Streamed updates: a shard applies each piece of an update as it arrives, and returns the updated piece.

The connection thread that receives the last missing piece applies it. A second thread of each connection sends the
updated pieces, so both directions of the connection are used at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from paceline.serve.shard.admission import AdmittedTransfer
from paceline.serve.shard.store import HeldUpdate
from paceline.serve.shard.streamed_store import PieceWork, StreamedStore
from paceline.serve.shard.updates import Updates
from paceline.serve.wire.frames import Channel, WireError
from paceline.serve.wire.messages import (
    DropUpdate,
    Hello,
    Identity,
    Pull,
    StreamUpdates,
    UpdatedPiece,
    UpdateHeld,
    UpdateReceived,
    Weights,
)

if TYPE_CHECKING:
    from paceline.serve.shard.worker_connection import WorkerConnection


class StreamedUpdates(Updates):
    """Applies each piece of an update as it arrives, and returns the updated piece to the worker."""

    full_duplex = True
    store: StreamedStore

    def __init__(self, store: StreamedStore, state: threading.Condition, tell: Callable[[Any], None]) -> None:
        super().__init__(store, state, tell)
        self._connections: dict[tuple[int, int], WorkerConnection] = {}  # worker, incarnation → its newest connection

    def connected(self, connection: WorkerConnection, hello: Hello) -> None:
        with self._state:
            known = self._connections.get((hello.worker, hello.incarnation))
            if known is None or known.number < connection.number:  # the thread of an older one may begin later
                self._connections[hello.worker, hello.incarnation] = connection

    def disconnected(self, channel: Channel, hello: Hello) -> None:
        with self._state:
            known = self._connections.get((hello.worker, hello.incarnation))
            if known and known.channel is channel:
                del self._connections[hello.worker, hello.incarnation]

    def receive(self, update: Identity, piece: int, held: HeldUpdate, transfer: AdmittedTransfer | None) -> bool:
        if transfer:
            transfer.leave()
        with self._state:
            if self.store.is_settled(update, piece):  # pushed again because the answer was lost, or too late
                self.store.return_buffer(piece, held.gradient)
                work = None
                self._return(update, piece)
            else:
                work = self.store.put(update, piece, held)
            is_held = self.store.is_held(update)
        if is_held:
            self._tell(UpdateHeld(update))
        self._apply(work)
        return False

    def pull(self, connection: WorkerConnection, request: Pull) -> None:
        """Send all pieces, each as it is now or as predicted. They contain every update that the log counts.

        A piece may also contain parts of updates that the log does not count yet. Then it is predicted over a few steps
        too many. Only a worker that joins or has lost its turn pulls here. A worker that pushes is returned pieces with
        the right prediction.
        """
        steps = self.store.steps_ahead(request.expected)
        for piece in range(len(self.store.slices)):
            with self._state:
                self._await_idle(piece)
                copy = self.store.copy(piece, steps)
            connection.send_weights(Weights(request.version, piece), copy, exact=request.exact)

    def carry_out(self, order: Any) -> None:
        held: list[Identity] = []
        with self._state:
            if isinstance(order, StreamUpdates):
                works = self.store.order(order)
                held = [update for update in order.updates if self.store.is_held(update)]
            elif isinstance(order, DropUpdate):
                works, were_held = self.store.drop(order.update)
                for piece in were_held:
                    self._return(order.update, piece)
            else:
                raise WireError(f"A {type(order).__name__} is out of place where updates are streamed.")
        for update in held:
            self._tell(UpdateHeld(update))
        for work in works:
            self._apply(work)

    def _await_quiet(self) -> None:
        while not self.store.is_quiet:
            self._state.wait(1.0)

    def _apply(self, work: PieceWork | None) -> None:
        """Make all steps that a piece can make now, and send the piece to the workers after each of them."""
        while work:
            work.apply()
            on_sent = self._return_after(len(work.updates), work.piece, work.copy)
            with self._state:
                following, whole = self.store.applied(work)
                connections = [self._connections.get((update.worker, update.incarnation)) for update in work.updates]
                self._state.notify_all()
            for update, connection in zip(work.updates, connections, strict=True):
                if connection:
                    connection.send_weights(UpdatedPiece(update.iteration, work.piece), work.copy, on_sent)
            for update in whole:
                self._tell(UpdateReceived(update))
            work = following

    def _return_after(self, times: int, piece: int, buffer: torch.Tensor) -> Callable[[], None]:
        """Return a callback that takes back a buffer when it is called for the last of `times` times.

        A buffer that is not sent to every worker is never taken back; it is garbage-collected.
        """
        left = times

        def on_sent() -> None:
            nonlocal left
            with self._state:
                left -= 1
                if left == 0:
                    self.store.return_buffer(piece, buffer)

        return on_sent

    def _return(self, update: Identity, piece: int) -> None:
        """Send a worker a piece that it has pushed, as the piece is now. The state is held."""
        connection = self._connections.get((update.worker, update.incarnation))
        if connection:
            self._await_idle(piece)
            connection.send_weights(UpdatedPiece(update.iteration, piece), self.store.copy_for(update, piece))

    def _await_idle(self, piece: int) -> None:
        """Wait until no update is being applied to a piece. The state is held."""
        while self.store.is_busy(piece):
            self._state.wait(1.0)
