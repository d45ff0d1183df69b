"""What is learned from and judged by: a cluster of unequal workers, a network, half of a data set, and when to stop."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from paceline.simulate.cluster_spec import ClusterSpec, Jitter, WorkerSpec, chance_of

#: The same regimes with less to compute: fewer units, pixels made one, and a target that such networks reach as soon.
SIZES: dict[str, dict[str, Any]] = {
    "whole": {},
    "small": {"units": 64, "pooled": 2, "target": 0.85},
    "tiny": {"units": 32, "pooled": 4, "target": 0.80},
    "bundled": {"units": 32, "target": 0.80, "dataset": "digits"},  # needs no data from elsewhere
}
INSTANT = 1e15  # bytes per second: here the network costs nothing, as in the paper


@dataclass(frozen=True)
class Instance:
    """One training on one cluster; everything random about it comes from its seed."""

    seed: int
    steps: tuple[float, ...]  # each worker's seconds for one step, without sleep
    sleeps: tuple[tuple[float, float, float], ...]  # each one's: how probable, and how long, mean and deviation
    hidden: int = 1  # layers
    units: int = 256  # of each
    pooled: int = 1  # pixels of an image, in each direction, that are made one
    rate: float = 0.01
    momentum: float = 0.0
    batch: int = 16
    dataset: str = "mnist"
    share: float = 0.5  # of the training samples
    target: float = 0.88  # accuracy on the validation set
    budget: int = 1500  # updates, after which it has failed

    @property
    def workers(self) -> int:
        return len(self.steps)

    def cluster(self) -> ClusterSpec:
        """The cluster, for the simulator."""
        workers = tuple(
            WorkerSpec(INSTANT, self.batch, self.batch / step, jitter=Jitter("straggle", 0.0, 0.0, *sleep))
            for step, sleep in zip(self.steps, self.sleeps, strict=True)
        )
        return ClusterSpec(f"instance {self.seed}", 1.0, 1, INSTANT, 0.0, INSTANT, math.inf, workers)

    def seconds(self) -> list[random.Random]:
        """What each worker's step times are drawn from, as the simulator draws them."""
        return [chance_of(worker, self.seed) for worker in range(self.workers)]


def drawn(
    seed: int, workers: int = 10, hidden: int | None = None, dataset: str = "mnist", size: str = "whole"
) -> Instance:
    """An instance at random: of any of the regimes in which one policy or another is the best (docs/rlp.md)."""
    chance = random.Random(f"instance {seed}")
    kind = chance.choices(("even", "unsteady", "some", "sometimes", "spread"), (6, 5, 4, 3, 2))[0]
    low, high = (0.3, 1.2) if kind == "unsteady" else (0.5, 6.0)
    sleep = math.exp(chance.uniform(math.log(low), math.log(high)))
    steps = [chance.uniform(0.9, 1.1) for _ in range(workers)]
    sleeps = [(1.0, 0.1, 0.05)] * workers
    if kind == "some":  # some workers sleep in every step
        sleeps = [(1.0, sleep, sleep / 4) if chance.random() < 0.3 else calm for calm in sleeps]
    elif kind in ("sometimes", "unsteady"):  # all sleep, now and then
        sleeps = [(0.3, sleep, sleep / 3)] * workers
    elif kind == "spread":  # everybody has a pace of its own
        steps = [chance.lognormvariate(0.0, 0.5) for _ in range(workers)]
    depth = chance.choice((0, 1, 2, 3))
    momentum, low, high = chance.choices(((0.0, 0.008, 0.1), (0.5, 0.004, 0.04), (0.9, 0.002, 0.03)), (5, 2, 3))[0]
    rate = math.exp(chance.uniform(math.log(low), math.log(high)))
    depth = depth if hidden is None else hidden
    if depth > 1:
        rate /= 1.5
    if depth == 0:
        size = "whole" if dataset == "mnist" and size in ("tiny", "small") else size  # it has little to compute
    cluster = Instance(seed, tuple(steps), tuple(sleeps), depth, rate=rate, momentum=momentum, dataset=dataset)
    return replace(cluster, **SIZES[size])


def unseen(hundred: int = 3) -> list[Instance]:
    """A hundred that policies are judged by; nothing is ever learned from them.

    hundred: the first was looked at to find out what the network has to see. The others were drawn when the network
    that comes along had been learned: by the second it was compared with others, by the third it was judged once.
    """
    plain = json.loads((resources.files("paceline.rlp") / "unseen.json").read_text())
    return [
        Instance(**{**each, "steps": tuple(each["steps"]), "sleeps": tuple(map(tuple, each["sleeps"]))})
        for each in plain[100 * (hundred - 1) : 100 * hundred]
    ]
