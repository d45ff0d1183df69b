"""A worker's link to one shard, and what it has received over it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from paceline.model.differences import EXACT, FollowedModel
from paceline.model.encodings import Floats
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.frames import Channel, WireError
from paceline.serve.wire.messages import Ranges, UpdatedPiece, Weights

ELEMENT = 4  # bytes of a weight

#: Returns where the body of a message of this size belongs, or None if it is not needed.
Place = Callable[[Any, int], memoryview | None]


class ShardLink:
    """A worker's link to one shard, and the pieces of the model that this shard holds."""

    def __init__(self, number: int, endpoint: Endpoint, pieces: Ranges, codec: str = "", trained: int = 0) -> None:
        """codec: in which the shard encodes the model (`model.differences`), or none.

        trained: the elements of the whole model before its running statistics, which are not encoded.
        """
        self.number, self.endpoint, self.pieces, self.codec = number, endpoint, pieces, codec
        self.channel: Channel | None = None
        self.sending = threading.Lock()  # held while a piece is sent, or sent again
        self.version = -1  # of the weights that were last pulled from this shard
        self.moved = threading.Event()  # set when the shard's backup has taken over at a new endpoint
        self._trained = trained
        self._followed: list[FollowedModel] = []  # the pieces as the shard knows that this worker has them
        self._scratch = bytearray()

    def piece_of(self, flat: memoryview, piece: int) -> memoryview:
        """Return the bytes of a piece in a flat float32 buffer of the whole model."""
        start, stop = self.pieces[piece]
        return flat[start * ELEMENT : stop * ELEMENT]

    def use(self, channel: Channel) -> None:
        """Use a new connection. Over each one, the shard sends the whole model before it sends differences."""
        self.channel = channel
        if self.codec:
            self._followed = [
                FollowedModel(self.codec, stop - start, stop - max(start, min(stop, self._trained)))
                for start, stop in self.pieces
            ]

    def receive(self, channel: Channel, place: Place) -> Any:
        """Receive a message and its body. Return the message. Encoded pieces of the model are decoded.

        A piece that is not needed is decoded too, because the next difference is one to this piece.
        """
        body: memoryview | None = None
        wanted: memoryview | None = None

        def find(message: Any, size: int) -> memoryview:
            nonlocal body, wanted
            wanted = place(message, size)
            if self._is_followed(message):
                body = self._body(message, size)
                return body
            return self._unused(size) if wanted is None else wanted

        message = channel.receive(find)
        if self._is_followed(message) and body is not None:
            values = self._decoded(message, body)
            if wanted is not None:
                np.copyto(np.frombuffer(wanted, np.float32), values)
        return message

    def _is_followed(self, message: Any) -> bool:
        return bool(self.codec) and isinstance(message, Weights | UpdatedPiece)

    def _body(self, message: Weights | UpdatedPiece, size: int) -> memoryview:
        """Return a buffer for the body of a piece of the model."""
        model = self._followed[message.piece]
        try:
            due = model.size(message.dtype)
        except ValueError as error:
            raise WireError(f"The shard sent a piece of the model that cannot be decoded: {error}.") from None
        if size != due:
            raise WireError(f"The shard sent a piece of the model as {size} bytes of {message.dtype}, not {due}.")
        return model.values.data.cast("B") if message.dtype == EXACT else self._unused(size)

    def _unused(self, size: int) -> memoryview:
        """Return a buffer for a body that is needed only until the next one is received."""
        if len(self._scratch) < size:
            self._scratch = bytearray(size)
        return memoryview(self._scratch)[:size]

    def _decoded(self, message: Weights | UpdatedPiece, body: memoryview) -> Floats:
        """Return a piece of the model from the body that it was sent in."""
        model = self._followed[message.piece]
        try:
            model.receive(body, message.dtype)
        except ValueError as error:
            raise WireError(f"The shard sent a piece of the model that cannot be decoded: {error}.") from None
        return model.values

    def move(self, endpoint: Endpoint) -> None:
        """Use another endpoint from now on. A thread that uses the old connection wakes with an error."""
        self.endpoint = endpoint
        self.moved.set()
        if channel := self.channel:
            channel.cut()

    def hang_up(self) -> None:
        """Close the connection, if there is one."""
        if self.channel:
            self.channel.close()
            self.channel = None
