"""Training instances, as the paper calls them: a cluster of unequal workers, an underlying model, and its data.

Policies learn from some instances and are judged by others.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from paceline.simulate.cluster_spec import ClusterSpec, Jitter, WorkerSpec, worker_rng

#: The same regimes with less computation: fewer units, pooled pixels, and a target that such networks reach as early.
SIZES: dict[str, dict[str, Any]] = {
    "whole": {},
    "small": {"units": 64, "pooled": 2, "target": 0.85},
    "tiny": {"units": 32, "pooled": 4, "target": 0.80},
    "bundled": {"units": 32, "target": 0.80, "dataset": "digits"},  # needs no files
}
INSTANT = 1e15  # bytes per second; communication takes no time, as in the paper


@dataclass(frozen=True)
class Instance:
    """One training on one cluster. Its seed determines everything random."""

    seed: int
    steps: tuple[float, ...]  # seconds of one step of each worker, without sleep
    sleeps: tuple[tuple[float, float, float], ...]  # of each worker: probability, and mean and deviation of the length
    hidden: int = 1  # number of hidden layers
    units: int = 256  # of each hidden layer
    pooled: int = 1  # pixels that are pooled into one, in each direction
    rate: float = 0.01
    momentum: float = 0.0
    batch: int = 16
    dataset: str = "mnist"
    share: float = 0.5  # of the training samples that are used
    target: float = 0.88  # accuracy on the validation set
    budget: int = 1500  # updates after which the training counts as failed

    @property
    def workers(self) -> int:
        return len(self.steps)

    def cluster(self) -> ClusterSpec:
        """Return the cluster, for the simulator."""
        workers = tuple(
            WorkerSpec(INSTANT, self.batch, self.batch / step, jitter=Jitter("straggle", 0.0, 0.0, *sleep))
            for step, sleep in zip(self.steps, self.sleeps, strict=True)
        )
        return ClusterSpec(f"instance {self.seed}", 1.0, 1, INSTANT, 0.0, INSTANT, math.inf, workers)

    def step_chances(self) -> list[random.Random]:
        """Return the random generators of the workers' step times, as the simulator has them."""
        return [worker_rng(worker, self.seed) for worker in range(self.workers)]


def drawn(
    seed: int, workers: int = 10, hidden: int | None = None, dataset: str = "mnist", size: str = "whole"
) -> Instance:
    """Draw an instance from all regimes, in which different policies are best (docs/rlp.md)."""
    chance = random.Random(f"instance {seed}")
    kind = chance.choices(("even", "unsteady", "some", "sometimes", "spread"), (6, 5, 4, 3, 2))[0]
    low, high = (0.3, 1.2) if kind == "unsteady" else (0.5, 6.0)
    sleep = math.exp(chance.uniform(math.log(low), math.log(high)))
    steps = [chance.uniform(0.9, 1.1) for _ in range(workers)]
    sleeps = [(1.0, 0.1, 0.05)] * workers
    if kind == "some":  # some workers sleep in every step
        sleeps = [(1.0, sleep, sleep / 4) if chance.random() < 0.3 else calm for calm in sleeps]
    elif kind in ("sometimes", "unsteady"):  # all workers sleep in some steps
        sleeps = [(0.3, sleep, sleep / 3)] * workers
    elif kind == "spread":  # each worker has its own pace
        steps = [chance.lognormvariate(0.0, 0.5) for _ in range(workers)]
    depth = chance.choice((0, 1, 2, 3))
    momentum, low, high = chance.choices(((0.0, 0.008, 0.1), (0.5, 0.004, 0.04), (0.9, 0.002, 0.03)), (5, 2, 3))[0]
    rate = math.exp(chance.uniform(math.log(low), math.log(high)))
    depth = depth if hidden is None else hidden
    if depth > 1:
        rate /= 1.5
    if depth == 0:
        size = "whole" if dataset == "mnist" and size in ("tiny", "small") else size  # it is cheap to compute
    cluster = Instance(seed, tuple(steps), tuple(sleeps), depth, rate=rate, momentum=momentum, dataset=dataset)
    return replace(cluster, **SIZES[size])


def unseen(hundred: int = 3) -> list[Instance]:
    """Return a hundred instances that policies are judged by. Nothing is ever learned from them.

    hundred: which of three. The first was used to choose the features of the state. The others were drawn after the
    shipped network had been learned: the second compared it with other networks, and the third judged it once.
    """
    plain = json.loads((resources.files("paceline.rlp") / "unseen.json").read_text())
    return [
        Instance(**{**each, "steps": tuple(each["steps"]), "sleeps": tuple(map(tuple, each["sleeps"]))})
        for each in plain[100 * (hundred - 1) : 100 * hundred]
    ]
