"""A gradient on its way from a worker to the shards."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.serve.wire.messages import GradientReady, GradientStarted, Push
from paceline.serve.worker.streamed_exchange import Backward


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

    def push(self, iteration: int, piece: int = 0) -> Push:
        """Return the message with which a piece of the gradient is pushed."""
        return Push(iteration, self.rates, self.dtype, piece)

    def started(self, iteration: int, version: int) -> GradientStarted:
        """Return the message that announces that the gradient is being computed."""
        return GradientStarted(iteration, version, self.batch_size, self.taken)

    def ready(self, iteration: int, version: int) -> GradientReady:
        """Return the message that announces that the gradient is computed. Wait for the backward pass to end."""
        seconds, loss = self.backward.outcome() if self.backward else (self.compute_seconds, self.loss)
        return GradientReady(iteration, version, self.batch_size, seconds, loss, self.taken)
