"""The model of a simulated cluster: what the cluster needs from one that holds tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from paceline.job import Identity
from paceline.policies import Apply, Keep, Update


class SimulatedModel(Protocol):
    """A model that a simulated cluster trains. Without one, updates are only counted."""

    over: Any  # the run ends once this is true
    momentum: float  # of the optimizer

    def grant(self, worker: int, staleness: int | None) -> None:
        """Note a Grant to a worker.

        staleness: the staleness that the policy expects of the worker's next update, counted from now.
        """

    def pull(self, worker: int, staleness: int | None) -> None:
        """Give a worker the newest weights.

        staleness: that of the update which the worker will compute from them, if it is known.
        """

    def compute(self, worker: int, batch: int) -> None:
        """Let a worker compute from the weights that it has."""

    def loss(self, worker: int) -> float | None:
        """Return the loss of what a worker has computed. It is called only if the policy uses the loss."""

    def arrive(self, update: Identity) -> None:
        """Note that an update has arrived."""

    def drop(self, worker: int) -> None:
        """Forget the gradient that a worker is computing or pushing."""

    def keep(self, keep: Keep) -> None:
        """Keep an update in a slot."""

    def discard(self, update: Update) -> None:
        """Forget an update that has arrived."""

    def apply(self, apply: Apply, time: float) -> Sequence[float]:
        """Change the model. Return the cosine of each update with their mean, if the policy compares updates."""


class CountedModel:
    """A model that does nothing. Subclasses record the order of events."""

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
