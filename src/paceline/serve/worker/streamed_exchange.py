"""The worker's side of a streamed update: it pushes pieces of a gradient while the shards return pieces of the model.

`push_to_all` says in which order pieces are pushed, or the coordinator does (`visited_push`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.serve.wire.frames import Channel
from paceline.serve.wire.messages import UpdatedPiece
from paceline.serve.worker.gradient import OutgoingGradient
from paceline.serve.worker.shard_link import ShardLink

NEARLY_DRAINED = 1 << 17  # bytes still on their way to one shard when a worker may go on to the next


class StreamedExchange:
    """One streamed update, and the updated pieces of the model that the shards return for it."""

    def __init__(
        self,
        iteration: int,
        gradient: OutgoingGradient,
        weights: memoryview,
        raise_if_over: Callable[[Any], None],
    ) -> None:
        """raise_if_over: raises an error if an answer of a shard ends the exchange."""
        self._iteration, self._raise_if_over = iteration, raise_if_over
        self._gradient, self._weights = gradient, weights
        self._queued: dict[ShardLink, list[int]] = {}  # the pieces that `send` was called for
        self._returned: dict[ShardLink, set[int]] = {}  # the pieces that have come back
        self._complete: dict[ShardLink, Channel] = {}  # the connection over which all queued pieces were sent

    def send(self, shard: ShardLink, piece: int) -> None:
        """Push a piece. If the connection is lost, `receive` notices that and sends the piece again."""
        with shard.sending:
            queued, channel = self._queued.setdefault(shard, []), shard.channel
            if channel and not queued:
                self._complete.setdefault(shard, channel)
            queued.append(piece)
            if channel and self._complete.get(shard) is channel:
                try:
                    self._send(channel, shard, piece)
                except OSError:
                    channel.cut()

    def drain(self, shard: ShardLink, all_but: int = 0) -> None:
        """Wait until the shard has received what was sent to it, but for these pieces or what a link carries at once.

        all_but: the number of pieces that may still be on their way.
        """
        channel = shard.channel
        if channel:
            size = sum(self._gradient.size(start, stop) for start, stop in shard.pieces)
            channel.drain(max(min(NEARLY_DRAINED, size // 4), size * all_but // len(shard.pieces)))

    def receive(self, shard: ShardLink, channel: Channel) -> None:
        """Receive updated pieces from a shard until all its pieces are back."""
        iteration, returned = self._iteration, self._returned.setdefault(shard, set())

        def place(message: Any, size: int) -> memoryview | None:
            if isinstance(message, UpdatedPiece) and message.iteration == iteration and message.piece not in returned:
                return shard.piece_of(self._weights, message.piece)
            return None  # a piece that was pushed again after a lost connection may come back twice

        with shard.sending:
            if self._complete.get(shard) is not channel:  # what was sent over the old connection may be lost
                self._complete[shard] = channel
                for piece in self._queued.get(shard, ()):
                    if piece not in returned:
                        self._send(channel, shard, piece)
        while len(returned) < len(shard.pieces):
            message = shard.receive(channel, place)
            self._raise_if_over(message)
            if isinstance(message, UpdatedPiece) and message.iteration == iteration:
                returned.add(message.piece)

    def _send(self, channel: Channel, shard: ShardLink, piece: int) -> None:
        channel.send(self._gradient.push(self._iteration, piece), self._gradient.body(*shard.pieces[piece]))
