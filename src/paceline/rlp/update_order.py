"""The order of updates that a fixed policy produces on a cluster.

It says when each update is applied, and which workers pull the model after it. The order depends on step times only.
So the policy first runs on the simulated cluster, without gradients. A fleet then trains in that order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.policies import Apply, Policy, Update
from paceline.rlp.instance import Instance
from paceline.simulate.cluster import Cluster
from paceline.simulate.simulated_model import CountedModel

SPARE = 5  # rounds to simulate beyond the budget, since the last updates to arrive are not always applied


Key = tuple[int, int, int]  # worker, incarnation and iteration, which identify an update


@dataclass
class UpdateOrder(CountedModel):
    """Records updates in the order in which they are applied, with one entry for each."""

    worker: list[int] = field(default_factory=list)
    step: list[int] = field(default_factory=list)  # the number of the worker's computation, from 0
    seconds: list[float] = field(default_factory=list)  # when it is applied
    completes: list[bool] = field(default_factory=list)  # whether it is the last update of its Apply
    turns: list[int] = field(default_factory=list)  # Applies in a round, as far as the policy knows
    pulled_by: list[dict[int, int]] = field(default_factory=list)  # workers that pull the model after it → staleness

    def __post_init__(self) -> None:
        self._begun: dict[int, int] = {}  # worker → computations that it has begun
        self._turns: dict[int, int] = {}  # worker → Applies in a round, according to its last Grant
        self._arrived: dict[Key, int] = {}  # update that has arrived → the number of its computation

    def grant(self, worker: int, staleness: int | None) -> None:
        self._turns[worker] = 1 if staleness is None else staleness + 1

    def pull(self, worker: int, staleness: int | None) -> None:
        if self.pulled_by:
            self.pulled_by[-1][worker] = max(staleness or 0, 0)

    def compute(self, worker: int, batch: int) -> None:
        self._begun[worker] = self._begun.get(worker, 0) + 1

    def arrive(self, update: Any) -> None:
        self._arrived[_key(update)] = self._begun[update.worker] - 1

    def discard(self, update: Update) -> None:
        self._arrived.pop(_key(update), None)

    def apply(self, apply: Apply, time: float) -> list[float]:
        turns = max(self._turns.get(update.worker, 1) for update in apply.updates)
        for update in apply.updates:
            self.worker.append(update.worker)
            self.step.append(self._arrived.pop(_key(update)))
            self.seconds.append(time)
            self.completes.append(update is apply.updates[-1])
            self.turns.append(turns)
            self.pulled_by.append({})
        return []

    def arrays(self, updates: int, workers: int) -> tuple[NDArray[Any], ...]:
        """Return worker, step, seconds, completes, turns and pulled_by of the first `updates` updates.

        pulled_by has the shape (updates, workers). It is −1 where a worker does not pull, and otherwise the staleness
        that the policy expects; 0 if it expects none.
        """
        pulled_by = np.full((updates, workers), -1)
        for number, pulling in enumerate(self.pulled_by[:updates]):
            for worker, staleness in pulling.items():
                pulled_by[number, worker] = staleness
        fields = (self.worker, self.step, self.seconds, self.completes, self.turns)
        return (*(np.array(each[:updates]) for each in fields), pulled_by)


def update_order(instance: Instance, policy: Policy) -> UpdateOrder:
    """Return the order of updates under a policy, until the budget is spent."""
    order = UpdateOrder()
    rounds = -(-instance.budget // instance.workers) + SPARE
    Cluster(instance.cluster(), policy, rounds, instance.seed, model=order).run()
    return order


def _key(update: Any) -> Key:
    return update.worker, update.incarnation, update.iteration
