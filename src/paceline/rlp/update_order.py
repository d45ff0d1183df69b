"""What a fixed policy makes of a cluster: who changes the model when, and who is given which version of it.

That depends on step times alone, so it is found out first, with the policy itself on the simulated cluster, and a
fleet then trains by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.policies import Apply, Policy
from paceline.rlp.instance import Instance
from paceline.simulate.cluster import Cluster
from paceline.simulate.simulated_model import CountedModel

SPARE = 5  # rounds that are simulated beyond the budget: what has arrived is not always applied before the end


@dataclass
class UpdateOrder(CountedModel):
    """One entry for each update, in the order in which they change the model."""

    worker: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # when
    whole: list[bool] = field(default_factory=list)  # is it the last of those that are applied together?
    given: list[list[int]] = field(default_factory=list)  # who is given the model after it

    def pull(self, worker: int, staleness: int | None) -> None:
        if self.given:
            self.given[-1].append(worker)

    def apply(self, apply: Apply, time: float) -> list[float]:
        for update in apply.updates:
            self.worker.append(update.worker)
            self.seconds.append(time)
            self.whole.append(update is apply.updates[-1])
            self.given.append([])
        return []

    def arrays(self, updates: int, workers: int) -> tuple[NDArray[Any], ...]:
        """Worker, seconds, whole, given (updates, workers) of the first so many."""
        given = np.zeros((updates, workers), bool)  # one of them may never get to push
        for number, whom in enumerate(self.given[:updates]):
            given[number, whom] = True
        return np.array(self.worker[:updates]), np.array(self.seconds[:updates]), np.array(self.whole[:updates]), given


def update_order(instance: Instance, policy: Policy) -> UpdateOrder:
    """What the policy does on this cluster until the budget is spent."""
    noted = UpdateOrder()
    rounds = -(-instance.budget // instance.workers) + SPARE
    Cluster(instance.cluster(), policy, rounds, instance.seed, model=noted).run()
    return noted
