"""The clusters of the RLP experiments: which workers are slow, and by how much."""

from __future__ import annotations

import random

from paceline.rlp.instance import Instance

#: Table 1: the seconds of a step of each worker.
STEPS = (9.17, 10.103, 4.37, 4.47, 4.57, 15.39, 22.189, 5.31, 4.97, 5.07)
#: The clusters of the map, from the mildest to the most severe stragglers.
SEVERITIES = (
    "even",
    "sleep 1 in 3 of 10 steps",
    "3 of 10 sleep 1",
    "sleep 4 in 3 of 10 steps",
    "3 of 10 sleep 4",
    "table 1",
)

Sleeps = tuple[tuple[float, float, float], ...]  # by worker: probability, mean and deviation of a sleep


def stragglers(seed: int, workers: int = 10, how_many: int | None = None) -> tuple[tuple[float, ...], Sleeps]:
    """Draw step times and sleeps as the paper does: a worker is a straggler with probability 0.3.

    A straggler sleeps for a normally distributed time in every step. The paper does not say how long. Table 1's
    stragglers take two to five times as long as the other workers, and so do these.

    how_many: the number of stragglers, in place of the probability.
    """
    chance = random.Random(f"stragglers {seed}")
    steps = tuple(chance.uniform(0.95, 1.05) for _ in range(workers))
    chosen = [chance.random() < 0.3 for _ in range(workers)]
    if how_many is not None:
        slow = set(chance.sample(range(workers), how_many))
        chosen = [worker in slow for worker in range(workers)]
    means = [chance.uniform(1.0, 3.5) for _ in range(workers)]
    sleeps = tuple((1.0, mu, mu / 4) if slow else (0.0, 0.0, 0.0) for slow, mu in zip(chosen, means, strict=True))
    return steps, sleeps


def paper_like(seed: int, workers: int = 10, hidden: int | None = None, how_many: int | None = None) -> Instance:
    """Draw an instance as the paper describes it: learning rate 0.01, no momentum, 0 to 3 hidden layers."""
    steps, sleeps = stragglers(seed, workers, how_many)
    depth = random.Random(f"depth {seed}").choice((0, 1, 2, 3)) if hidden is None else hidden
    return Instance(500_000 + seed, steps, sleeps, depth)


def severe(kind: str) -> tuple[tuple[float, ...], Sleeps]:
    """Return the step times and sleeps of one of the SEVERITIES."""
    calm = (1.0, 0.1, 0.05)
    steps = tuple(0.9 + 0.02 * worker for worker in range(10))
    sometimes = {"sleep 1 in 3 of 10 steps": 1.0, "sleep 4 in 3 of 10 steps": 4.0}
    if kind in sometimes:
        return steps, ((0.3, sometimes[kind], sometimes[kind] / 3),) * 10
    if kind == "table 1":
        return tuple(0.75 * step / 5 for step in STEPS), tuple((0.3, step / 6, step / 18) for step in STEPS)
    sleep = {"even": 0.1, "3 of 10 sleep 1": 1.0, "3 of 10 sleep 4": 4.0}[kind]
    return steps, tuple((1.0, sleep, sleep / 4) if worker in (2, 5, 8) else calm for worker in range(10))
