"""A start ahead of the pulled model, for workers that exchange in turns.

The model that a worker pulls lacks the newest local steps of the others: they push them later, in their own turns. If
each worker begins its round there, training lags behind local SGD. So a worker begins halfway between two places. One
is its own end point. The other is the pulled model, moved on by half as far as it has moved since the worker's last
exchange. docs/decisions/0032-outer-momentum.md has the reasons.
"""

from __future__ import annotations

import torch

from paceline.train.flat_model import FlatModel

MOVED_ON = 0.5  # a share of how far the pulled model has moved
OWN = 0.5  # the share of the worker's own end point in where it begins


class StartAhead:
    """Replaces pulled weights by those from which a worker begins its next round."""

    def __init__(self, flat: FlatModel) -> None:
        self._flat = flat
        self._pulled = flat.weights.clone()

    def restore(self) -> None:
        """Put the pulled weights back, before others are pulled: a pull without news leaves them as they are."""
        self._flat.weights.copy_(self._pulled)

    def begin_at_pulled(self) -> None:
        """Begin at the pulled weights, because this worker has no end point of its own."""
        self._pulled.copy_(self._flat.weights)

    def begin(self, kept: bool = False) -> None:
        """Begin ahead of the pulled weights. kept: the end point is in `keep_parameters`, and not in the model."""
        pulled, _ = self._flat.split(self._flat.weights)
        before, _ = self._flat.split(self._pulled)
        moved_on = torch.add(pulled, pulled - before, alpha=MOVED_ON)
        self._pulled.copy_(self._flat.weights)
        pulled.copy_(moved_on)
        self._flat.approach_parameters(OWN, kept)
