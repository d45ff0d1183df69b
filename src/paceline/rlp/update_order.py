"""The order of updates that a fixed policy produces on a cluster.

It says when each update is applied, and which workers pull the model after it. The order depends on step times only.
So the policy first runs on the simulated cluster, without gradients. A fleet then trains in that order.
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

SPARE = 5  # rounds to simulate beyond the budget, since the last updates to arrive are not always applied


@dataclass
class UpdateOrder(CountedModel):
    """Records updates in the order in which they are applied, with one entry for each."""

    worker: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # when it is applied
    completes: list[bool] = field(default_factory=list)  # whether it is the last update of its Apply
    pulled_by: list[list[int]] = field(default_factory=list)  # workers that pull the model after it

    def pull(self, worker: int, staleness: int | None) -> None:
        if self.pulled_by:
            self.pulled_by[-1].append(worker)

    def apply(self, apply: Apply, time: float) -> list[float]:
        for update in apply.updates:
            self.worker.append(update.worker)
            self.seconds.append(time)
            self.completes.append(update is apply.updates[-1])
            self.pulled_by.append([])
        return []

    def arrays(self, updates: int, workers: int) -> tuple[NDArray[Any], ...]:
        """Return worker, seconds, completes and pulled_by of the first `updates` updates.

        pulled_by has the shape (updates, workers).
        """
        pulled_by = np.zeros((updates, workers), bool)
        for number, pulling in enumerate(self.pulled_by[:updates]):
            pulled_by[number, pulling] = True
        fields = (self.worker, self.seconds, self.completes)
        return (*(np.array(each[:updates]) for each in fields), pulled_by)


def update_order(instance: Instance, policy: Policy) -> UpdateOrder:
    """Return the order of updates under a policy, until the budget is spent."""
    order = UpdateOrder()
    rounds = -(-instance.budget // instance.workers) + SPARE
    Cluster(instance.cluster(), policy, rounds, instance.seed, model=order).run()
    return order
