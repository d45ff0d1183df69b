"""How good policies are: their times on the same instances, beside those of the best fixed one."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.learn.behaviour import greedy, network_of
from paceline.learn.instance import Instance
from paceline.learn.order import Order, order
from paceline.learn.policy import RLP
from paceline.learn.rollout import Episodes, play, replay
from paceline.learn.weights import load
from paceline.policies import make
from paceline.workloads.data import Data

FIXED = ("bsp", "asp", "ssp:staleness=2", "ssp:staleness=5", "ssp:staleness=8", "dssp", "r2sp")
TOGETHER = {"cpu": 60, "cuda": 1500}  # episodes that are played at once: memory is what counts

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Times:
    """A policy's, with a row for each instance and a column for each seed."""

    reached: NDArray[np.bool_]
    updates: NDArray[np.int64]
    seconds: Floats  # until the target, or until the budget was spent

    @property
    def mean(self) -> Floats:
        """Of each instance."""
        found: Floats = self.seconds.mean(1)
        return found


def judged(
    instances: Sequence[Instance],
    seeds: int,
    specs: Sequence[str],
    data: Callable[[str], Data],
    device: str = "cpu",
    say: Callable[[int, int], None] | None = None,
) -> dict[str, Times]:
    """Each instance under each policy, so many times with other chances. data: gives a set by its name."""
    by_shape: dict[object, list[int]] = {}
    for number, each in enumerate(instances):
        shape = (each.workers, each.hidden, each.units, each.pooled, each.dataset, each.budget, each.batch)
        by_shape.setdefault(shape, []).append(number)
    shape_of = (len(instances), seeds)
    found = {spec: Times(np.zeros(shape_of, bool), np.zeros(shape_of, int), np.zeros(shape_of)) for spec in specs}
    done, several = 0, max(1, TOGETHER[torch.device(device).type] // seeds)
    for numbers in by_shape.values():
        table = data(instances[numbers[0]].dataset)
        for at in range(0, len(numbers), several):
            some = numbers[at : at + several]
            repeated = [
                replace(instances[each], seed=instances[each].seed * 1000 + seed)
                for each in some
                for seed in range(seeds)
            ]
            for spec, times in found.items():
                episodes = _under(spec, repeated, table, device)
                for name in ("reached", "updates", "seconds"):
                    getattr(times, name)[some] = getattr(episodes, name).cpu().numpy().reshape(len(some), seeds)
                done += len(some)
                if say:
                    say(done, len(instances) * len(specs))
    return found


def ratios(times: dict[str, Times]) -> dict[str, Floats]:
    """Each policy's time by that of the best fixed policy for that instance."""
    best = np.min([times[spec].mean for spec in FIXED if spec in times], axis=0)
    return {spec: each.mean / best for spec, each in times.items()}


def best_fixed(times: dict[str, Times]) -> list[str]:
    """For each instance, the fixed policy that is the best."""
    fixed = [spec for spec in FIXED if spec in times]
    return [fixed[at] for at in np.argmin([times[spec].mean for spec in fixed], axis=0)]


def interval(values: Floats) -> float:
    """Half the width of the mean's 95% confidence interval."""
    return 1.96 * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _under(spec: str, instances: list[Instance], data: Data, device: str) -> Episodes:
    policy = make(spec)
    if isinstance(policy, RLP):
        weights = load(policy.network)
        chooser = greedy(network_of(weights).to(device), weights.rules, len(instances), device)
        return play(instances, data, chooser, weights.state, device)
    return replay(instances, _orders(spec, instances), data, device)


def _orders(spec: str, instances: list[Instance]) -> list[Order]:
    asked = [(instance, spec) for instance in instances]
    if len(asked) < 200 or (os.cpu_count() or 1) < 4:
        return [_order(each) for each in asked]
    with ProcessPoolExecutor() as pool:
        return list(pool.map(_order, asked, chunksize=16))


def _order(asked: tuple[Instance, str]) -> Any:
    instance, spec = asked
    return order(instance, make(spec))
