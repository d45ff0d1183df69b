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
MODEL = 1e9  # bytes of a model whose transfer takes time. How many does not matter; the transfer's seconds do.
PUSH = 1.01  # seconds of a push, by those of a pull. On a full link, a pull and a push would else end at the same time.
FREE = 0.25  # share of the instances with links whose transfers take no time
ROUND = (
    0.1,
    6.0,
)  # in the others, the seconds in which a round's updates cross the server's link; a step takes about 1


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
    transfer: float = 0.0  # seconds for which one model fills the server's link; an update takes PUSH times as long

    @property
    def workers(self) -> int:
        return len(self.steps)

    def cluster(self) -> ClusterSpec:
        """Return the cluster, for the simulator."""
        link = MODEL / self.transfer if self.transfer else INSTANT
        workers = tuple(
            WorkerSpec(link, self.batch, self.batch / step, jitter=Jitter("straggle", 0.0, 0.0, *sleep))
            for step, sleep in zip(self.steps, self.sleeps, strict=True)
        )
        size = MODEL if self.transfer else 1.0
        apply_rate, into = size * INSTANT, link / PUSH
        name = f"instance {self.seed}"
        return ClusterSpec(name, size, 1, link, 0.0, apply_rate, math.inf, workers, server_link_in=into)

    def step_chances(self) -> list[random.Random]:
        """Return the random generators of the workers' step times, as the simulator has them."""
        return [worker_rng(worker, self.seed) for worker in range(self.workers)]


def drawn(
    seed: int,
    workers: int = 10,
    hidden: int | None = None,
    dataset: str = "mnist",
    size: str = "whole",
    links: bool = False,
) -> Instance:
    """Draw an instance from all regimes, in which different policies are best (docs/rlp.md).

    links: whether the workers may share a link to the server. Otherwise transfers take no time, as in the paper.
    """
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
    if links and chance.random() >= FREE:
        round_seconds = math.exp(chance.uniform(*map(math.log, ROUND)))
        cluster = replace(cluster, transfer=round_seconds / workers)
    return replace(cluster, **SIZES[size])


def drawn_hundred(seed: int) -> list[Instance]:
    """Draw a hundred instances with links, to judge a network that has been learned before this seed was chosen."""
    first = 3_000_000_000 + 1000 * seed
    return [drawn(number, links=True) for number in range(first, first + 100)]


def unseen(hundred: int = 3) -> list[Instance]:
    """Return a hundred instances that policies are judged by. Nothing is ever learned from them.

    hundred: which of three. The first was used to choose the features of the state. The others were drawn after the
    shipped network had been learned: the second compared it with other networks, and the third judged it once.
    """
    plain = json.loads((resources.files("paceline.rlp") / "unseen.json").read_text())
    return [from_plain(each) for each in plain[100 * (hundred - 1) : 100 * hundred]]


def from_plain(plain: dict[str, Any]) -> Instance:
    """Return the instance that was written as JSON."""
    return Instance(**{**plain, "steps": tuple(plain["steps"]), "sleeps": tuple(map(tuple, plain["sleeps"]))})
