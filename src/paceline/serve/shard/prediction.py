"""Predicted weights: the weights as they will be when a gradient that is computed from them is applied.

A prediction has a buffer of its own, so the weights may change while it is sent. Workers that pull at the same time, as
a group of R²SP does, share one prediction. The last prediction is kept, together with its buffer.

This module uses no socket and no thread. The caller holds a lock, except over `compute`, during which no step may be
made.
"""

from __future__ import annotations

import threading

import torch

from paceline.serve.shard.store import WholeStore


class PredictedWeights:
    """The weights of one version as predicted for `steps` steps later, and how many pulls are sending them."""

    def __init__(self, store: WholeStore, steps: int, buffer: torch.Tensor) -> None:
        self.version, self.steps, self.buffer = store.version, steps, buffer
        self.users = 0
        self._store = store
        self._computing = threading.Lock()
        self._computed = False

    @property
    def bytes(self) -> memoryview:
        """The bytes of the buffer."""
        return self.buffer.numpy().data.cast("B")

    def compute(self) -> None:
        """Fill the buffer, unless another thread has filled it."""
        with self._computing:
            if not self._computed:
                self._store.slice.ahead(self.steps, self._store.correct, self.buffer)
                self._computed = True


class Predictor:
    """Predictions of one shard's weights."""

    def __init__(self, store: WholeStore) -> None:
        self._store = store
        self._last: PredictedWeights | None = None

    def take(self, steps: int) -> PredictedWeights:
        """Return the current weights as predicted for `steps` steps later. Call its `compute`, then `release` it."""
        last, store = self._last, self._store
        if last is None or (last.version, last.steps) != (store.version, steps):
            buffer = last.buffer if last and not last.users else store.take_buffer()
            last = self._last = PredictedWeights(store, steps, buffer)
        last.users += 1
        return last

    def release(self, predicted: PredictedWeights) -> None:
        """End one use of a prediction. Its buffer is reused when nobody sends it and a newer prediction exists."""
        predicted.users -= 1
        if not predicted.users and predicted is not self._last:
            self._store.return_buffer(0, predicted.buffer)
