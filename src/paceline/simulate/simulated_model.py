"""What becomes of tensors in a simulated cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from paceline.job import Identity
from paceline.policies import Apply, Keep, Update


class SimulatedModel(Protocol):
    """What becomes of tensors. Without one, updates are only counted."""

    over: Any  # once this is true, the run is
    momentum: float  # of the optimizer

    def grant(self, worker: int, staleness: int | None) -> None:
        """A worker may go on; staleness: that the policy expects of its next update, counted from now."""

    def pull(self, worker: int, staleness: int | None) -> None:
        """A worker is given the newest weights; staleness: of the update it will make of them, where it is known."""

    def compute(self, worker: int, batch: int) -> None: ...
    def loss(self, worker: int) -> float | None:
        """Of what a worker has computed; asked for where the policy wants to know."""

    def arrive(self, update: Identity) -> None: ...
    def drop(self, worker: int) -> None:
        """What a worker was computing or pushing will not arrive."""

    def keep(self, keep: Keep) -> None: ...
    def discard(self, update: Update) -> None: ...
    def apply(self, apply: Apply, time: float) -> Sequence[float]:
        """Change the model. Where the policy compares updates: the cosine of each with their mean."""


class CountedModel:
    """Stands where a model would, for who wants to know in which order things happen: all of this comes to nothing."""

    over, momentum = False, 0.0

    def grant(self, worker: int, staleness: int | None) -> None: ...
    def pull(self, worker: int, staleness: int | None) -> None: ...
    def compute(self, worker: int, batch: int) -> None: ...
    def loss(self, worker: int) -> None: ...
    def arrive(self, update: Identity) -> None: ...
    def drop(self, worker: int) -> None: ...
    def keep(self, keep: Keep) -> None: ...
    def discard(self, update: Update) -> None: ...
    def apply(self, apply: Apply, time: float) -> Sequence[float]:
        return ()
