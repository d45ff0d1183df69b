"""Streamed, behind a shard's sockets: pieces are moved one by one, by the thread that received the last one it took.

A copy of each goes back to its worker, over a thread of that worker's own, so both ways of a connection are in use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from paceline.serve.shard.store import HeldUpdate
from paceline.serve.shard.streamed_store import PieceWork, StreamedStore
from paceline.serve.wire.frames import Channel, WireError
from paceline.serve.wire.messages import (
    DropUpdate,
    Hello,
    Identity,
    StreamUpdates,
    UpdatedPiece,
    UpdateReceived,
    Weights,
)

if TYPE_CHECKING:
    from paceline.serve.shard.worker_connection import WorkerConnection


class PieceApplier:
    """A shard's Streams, and the workers that its pieces go back to. Any thread may call."""

    def __init__(self, streams: StreamedStore, state: threading.Condition, tell: Callable[[Any], None]) -> None:
        """state: guards the streams. tell: says something to the coordinator."""
        self._streams, self._state, self._tell = streams, state, tell
        self._visits: dict[tuple[int, int], WorkerConnection] = {}  # worker, incarnation → its newest connection

    def visited(self, visit: WorkerConnection, hello: Hello) -> None:
        """From now on a worker's pieces go back over this connection."""
        with self._state:
            self._visits[hello.worker, hello.incarnation] = visit

    def left(self, hello: Hello, channel: Channel) -> None:
        """That connection is gone."""
        with self._state:
            known = self._visits.get((hello.worker, hello.incarnation))
            if known and known.channel is channel:
                del self._visits[hello.worker, hello.incarnation]

    def put(self, update: Identity, piece: int, held: HeldUpdate) -> None:
        """A piece of an update is in. It is applied when its turn comes, and goes back then."""
        with self._state:
            if self._streams.is_over(update, piece):  # sent again, since the answer was lost; or it came too late
                self._streams.free(piece, held.gradient)
                work = None
                self._return(update, piece)
            else:
                work = self._streams.put(update, piece, held)
        self._go_on(work)

    def carry_out(self, order: Any) -> None:
        """What the log says."""
        with self._state:
            if isinstance(order, StreamUpdates):
                works = self._streams.order(order)
            elif isinstance(order, DropUpdate):
                works, here = self._streams.drop(order.update)
                for piece in here:
                    self._return(order.update, piece)
            else:
                raise WireError(f"A {type(order).__name__} is out of place where updates are streamed.")
        for work in works:
            self._go_on(work)

    def pull(self, visit: WorkerConnection, version: int, expected: int | None) -> None:
        """Send all pieces, each as it is now, or as it will be. All that the log counts is in them.

        What a piece has of pushes under way is not told from what the log counts, so it is predicted over a few steps
        too many then. Only who joins, or lost its turn, pulls here; whoever pushes is returned what is right.
        """
        steps = self._streams.steps_ahead(expected)
        for piece in range(len(self._streams.slices)):
            with self._state:
                self._until_still(piece)
                copy = self._streams.copy(piece, steps)
            visit.give(Weights(version, piece), copy)

    def await_quiet(self) -> None:
        """Until nothing is being applied."""
        with self._state:
            while not self._streams.is_quiet:
                self._state.wait(1.0)

    def _go_on(self, work: PieceWork | None) -> None:
        """Apply what can be applied to a piece, one after the other, and send it back."""
        while work:
            work.apply()
            sent = self._after(len(work.updates), work.piece, work.copy)
            with self._state:
                following, whole = self._streams.applied(work)
                push_order = [self._visits.get((update.worker, update.incarnation)) for update in work.updates]
                self._state.notify_all()
            for update, visit in zip(work.updates, push_order, strict=True):
                if visit:
                    visit.give(UpdatedPiece(update.iteration, work.piece), work.copy, sent)
            for update in whole:
                self._tell(UpdateReceived(update))
            work = following

    def _after(self, times: int, piece: int, buffer: torch.Tensor) -> Callable[[], None]:
        """What is called so many times when a buffer is sent, and then frees it. One that is never sent is let go."""
        left = times

        def sent() -> None:
            nonlocal left
            with self._state:
                left -= 1
                if left == 0:
                    self._streams.free(piece, buffer)

        return sent

    def _return(self, update: Identity, piece: int) -> None:
        """Send a worker a piece that it pushed, as it is now."""
        visit = self._visits.get((update.worker, update.incarnation))
        if visit:
            self._until_still(piece)
            visit.give(UpdatedPiece(update.iteration, piece), self._streams.copy_for(update, piece))

    def _until_still(self, piece: int) -> None:
        """Until nobody is moving it."""
        while self._streams.is_busy(piece):
            self._state.wait(1.0)
