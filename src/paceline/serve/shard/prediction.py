"""Weights as they will be when what is computed from them is applied: made for a pull, and for all that want the same.

A prediction is a buffer of its own, so nobody minds when the weights change while it is being sent. Those who pull
together (a group of R²SP does) share one; the last one that was made is kept, and so is its buffer.

It knows no socket and no thread: whoever calls holds a lock, except over `make`, while which no step may be made.
"""

from __future__ import annotations

import threading

import torch

from paceline.serve.shard.store import WholeStore


class PredictedWeights:
    """The weights of a version as they will be so many steps later, and how many are sending them."""

    def __init__(self, store: WholeStore, steps: int, buffer: torch.Tensor) -> None:
        self.version, self.steps, self.buffer = store.version, steps, buffer
        self.users = 0
        self._store = store
        self._making = threading.Lock()
        self._made = False

    @property
    def bytes(self) -> memoryview:
        return self.buffer.numpy().data.cast("B")

    def make(self) -> None:
        """Fill the buffer, if nobody has yet."""
        with self._making:
            if not self._made:
                self._store.slice.ahead(self.steps, self._store.correct, self.buffer)
                self._made = True


class Predictor:
    """Predictions of one shard's weights."""

    def __init__(self, store: WholeStore) -> None:
        self._store = store
        self._last: PredictedWeights | None = None

    def take(self, steps: int) -> PredictedWeights:
        """The weights of now as they will be so many steps later. To be made, used and given back."""
        last, store = self._last, self._store
        if last is None or (last.version, last.steps) != (store.version, steps):
            buffer = last.buffer if last and not last.users else store.room()
            last = self._last = PredictedWeights(store, steps, buffer)
        last.users += 1
        return last

    def give_back(self, foreseen: PredictedWeights) -> None:
        foreseen.users -= 1
        if not foreseen.users and foreseen is not self._last:
            self._store.free(0, foreseen.buffer)
