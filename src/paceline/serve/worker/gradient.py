"""A gradient on its way from a worker to the shards."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Protocol

from paceline.model.codecs import Encoder
from paceline.model.half_precision import WIDTH
from paceline.serve.wire.messages import GradientReady, GradientStarted, Push


class Backward(Protocol):
    """A gradient that is pushed while it is computed, from its end to its beginning."""

    def wait(self, start: int) -> None:
        """Wait until all elements of the gradient from `start` on are computed."""

    def outcome(self) -> tuple[float, float | None]:
        """Wait until the gradient is complete. Return the seconds that it took, and the loss."""


class _Codes:
    """The encoded parts of one gradient. Several threads add to them, one for each shard."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.of_range: dict[tuple[int, int], memoryview] = {}  # range of elements → its code
        self.are_void = False


@dataclass(frozen=True)
class OutgoingGradient:
    """A gradient to push, and what the worker reports about it to the coordinator."""

    buffer: memoryview
    rates: tuple[float, ...]  # the learning rate of each parameter group
    dtype: str  # of the elements in the buffer
    batch_size: int
    compute_seconds: float = 0.0
    loss: float | None = None
    taken: tuple[int, ...] = ()  # the numbers of the sample ranges that it was computed from
    backward: Backward | None = None  # the backward pass that is still computing it; None: it is computed
    encoder: Encoder | None = None  # with which it is encoded; None: its elements are sent as they are
    turn: int = 0  # the number of this gradient, for the encoder
    _codes: _Codes = field(init=False, default_factory=_Codes)

    def push(self, iteration: int, piece: int = 0) -> Push:
        """Return the message with which a piece of the gradient is pushed."""
        return Push(iteration, self.rates, self.encoder.codec.name if self.encoder else self.dtype, piece)

    def size(self, start: int, stop: int) -> int:
        """Return the number of bytes in which the elements from `start` to `stop` are sent."""
        return self.encoder.size(start, stop) if self.encoder else WIDTH[self.dtype] * (stop - start)

    def body(self, start: int, stop: int) -> memoryview:
        """Return the bytes in which the elements from `start` to `stop` are sent: the same in every call."""
        if self.encoder is None:
            width = WIDTH[self.dtype]
            return self.buffer[start * width : stop * width]
        body = self._codes.of_range.get((start, stop))
        if body is None:  # the encoder keeps the rest for the next gradient, so it must encode each range only once
            body = self.encoder.encode(self.buffer, self.dtype, start, stop, self.turn)
            with self._codes.lock:
                if not self._codes.are_void:
                    self._codes.of_range[start, stop] = body
                    return body
            self.encoder.take_back(self.buffer, self.dtype, start, stop, body)
            raise ConnectionError("This gradient was taken back.")
        return body

    def take_back(self) -> None:
        """Let the encoder forget this gradient, which is not applied. No more of it is encoded."""
        if self.encoder:
            with self._codes.lock:
                self._codes.are_void = True
            for (start, stop), body in self._codes.of_range.items():
                self.encoder.take_back(self.buffer, self.dtype, start, stop, body)

    def started(self, iteration: int, version: int) -> GradientStarted:
        """Return the message that announces that the gradient is being computed."""
        return GradientStarted(iteration, version, self.batch_size, self.taken)

    def ready(self, iteration: int, version: int) -> GradientReady:
        """Return the message that announces that the gradient is computed. Wait for the backward pass to end."""
        seconds, loss = self.backward.outcome() if self.backward else (self.compute_seconds, self.loss)
        return GradientReady(iteration, version, self.batch_size, seconds, loss, self.taken)
