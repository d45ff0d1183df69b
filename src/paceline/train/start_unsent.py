"""A start with what a worker has not sent yet, for workers that send one part of their model at a time.

Such a worker pulls the part that it has just pushed. Of the others it has the model as it was pulled some exchanges
ago, and its own steps since then, which it sends later. So it begins each round at the sum of the two. It would
otherwise lose these steps until the server has them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.model.encodings import Floats
from paceline.train.flat_model import FlatModel


class StartWithUnsent:
    """Replaces pulled weights by those from which a worker begins its next round."""

    def __init__(self, flat: FlatModel, unsent: Callable[[], Floats | None]) -> None:
        """unsent: returns by how much the worker has moved its parameters, and has not sent yet; None: by nothing."""
        self._flat, self._unsent = flat, unsent
        self._pulled = flat.weights.clone()

    def restore(self) -> None:
        """Put the pulled weights back, before others are pulled: a pull without news leaves them as they are."""
        self._flat.weights.copy_(self._pulled)

    def begin_at_pulled(self) -> None:
        """Begin at the pulled weights, and what is not sent yet: the worker has not lost that."""
        self.begin()

    def begin(self, kept: bool = False) -> None:
        """Begin at the pulled weights and what is not sent yet. kept: makes no difference here."""
        self._pulled.copy_(self._flat.weights)
        unsent = self._unsent()
        if unsent is not None:
            parameters, _ = self._flat.split(self._flat.weights)
            parameters -= torch.from_numpy(unsent)
