"""Streamed, a worker's side: pieces of a gradient go out to the shards while pieces of the model come back.

The shards are visited one after the other, so that each is sent to at the full rate of the link. Worker i begins with
shard i+1: where there is a shard beside each worker, its pushes then keep clear of what its own shard returns to
others, and workers that follow one another in the ring follow one another at every shard too. A gradient that is still
being computed is pushed as it comes, from its end on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.frames import Channel
from paceline.serve.wire.messages import Push, Ranges, UpdatedPiece

ELEMENT = 4  # bytes of a weight
NEARLY = 1 << 17  # bytes that are still on their way to one shard when the next is sent to


class Backward(Protocol):
    """A gradient that is being computed while it is pushed, from its end to its beginning."""

    def wait(self, start: int) -> None:
        """Until all its elements from `start` on are there."""

    def outcome(self) -> tuple[float, float | None]:
        """When it is whole: how long it took, and the loss."""


class ShardLink:
    """One shard, and the pieces of the model that it holds."""

    def __init__(self, number: int, endpoint: Endpoint, pieces: Ranges) -> None:
        self.number, self.endpoint, self.pieces = number, endpoint, pieces
        self.channel: Channel | None = None
        self.sending = threading.Lock()
        self.version = -1  # of what was last pulled from it

    def piece(self, flat: memoryview, number: int, width: int = ELEMENT) -> memoryview:
        """Its bytes in a flat buffer of elements so wide."""
        start, stop = self.pieces[number]
        return flat[start * width : stop * width]

    def hang_up(self) -> None:
        if self.channel:
            self.channel.close()
            self.channel = None


def push_order(parts: Sequence[ShardLink], worker: int, from_the_end: bool) -> list[tuple[ShardLink, int]]:
    """In which order pieces are pushed. from_the_end: as a backward pass makes them, the last of the model first."""
    first = (worker + 1) % len(parts)
    in_turn = [*parts[first:], *parts[:first]]
    order = [(part, piece) for part in in_turn for piece in range(len(part.pieces))]
    return sorted(order, key=_start, reverse=True) if from_the_end else order


def _start(visit: tuple[ShardLink, int]) -> int:
    part, piece = visit
    return part.pieces[piece][0]


class StreamedExchange:
    """One update, and the weights that come back for it."""

    def __init__(
        self,
        push: Callable[[int], Push],
        gradient: memoryview,
        width: int,
        weights: memoryview,
        raise_if_over: Callable[[Any], None],
    ) -> None:
        """push: the message for a piece. width: bytes of an element of the gradient. heed: raises if need be."""
        self._push, self._raise_if_over = push, raise_if_over
        self._gradient, self._width, self._weights = gradient, width, weights
        self._due: dict[ShardLink, list[int]] = {}  # pieces that were to be sent so far
        self._back: dict[ShardLink, set[int]] = {}  # pieces that have come back
        self._over: dict[ShardLink, Channel] = {}  # the connection over which all that is due was sent
        self._scratch = bytearray()

    def send(self, part: ShardLink, piece: int) -> None:
        """Push a piece. If the connection is lost, `receive` sees it and sends the piece again."""
        with part.sending:
            due, channel = self._due.setdefault(part, []), part.channel
            if channel and not due:
                self._over.setdefault(part, channel)
            due.append(piece)
            if channel and self._over.get(part) is channel:
                try:
                    self._send(channel, part, piece)
                except OSError:
                    channel.cut()

    def drain(self, part: ShardLink) -> None:
        """Until the shard has nearly all that it was sent."""
        channel = part.channel
        if channel:
            elements = sum(stop - start for start, stop in part.pieces)
            channel.drain(min(NEARLY, elements * self._width // 4))

    def receive(self, part: ShardLink, channel: Channel) -> None:
        """Take in what the shard returns, until all its pieces are back."""
        iteration, back = self._push(0).iteration, self._back.setdefault(part, set())

        def place(message: Any, size: int) -> memoryview:
            if isinstance(message, UpdatedPiece) and message.iteration == iteration and message.piece not in back:
                return part.piece(self._weights, message.piece)
            if len(self._scratch) < size:  # what was asked for twice, over a lost connection, may come twice
                self._scratch = bytearray(size)
            return memoryview(self._scratch)[:size]

        with part.sending:
            if self._over.get(part) is not channel:  # what the old one may have swallowed is sent again
                self._over[part] = channel
                for piece in self._due.get(part, ()):
                    if piece not in back:
                        self._send(channel, part, piece)
        while len(back) < len(part.pieces):
            message = channel.receive(place)
            self._raise_if_over(message)
            if isinstance(message, UpdatedPiece) and message.iteration == iteration:
                back.add(message.piece)

    def _send(self, channel: Channel, part: ShardLink, piece: int) -> None:
        channel.send(self._push(piece), part.piece(self._gradient, piece, self._width))
