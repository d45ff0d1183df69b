"""How good policies are: their times on the same instances, beside those of the best fixed one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.policies import make
from paceline.rlp.instance import Instance
from paceline.rlp.network_file import load
from paceline.rlp.policy import RLP
from paceline.rlp.process_pool import pool_of, table
from paceline.rlp.rollout import play, replay
from paceline.rlp.rule_network import greedy, network_of
from paceline.rlp.update_order import update_order
from paceline.workloads.data import Data

FIXED = ("bsp", "asp", "ssp:staleness=2", "ssp:staleness=5", "ssp:staleness=8", "dssp", "r2sp")
MEMORY = 80e9  # bytes of a GPU that are made use of

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Times:
    """A policy's, with a row for each instance and a column for each seed."""

    reached: NDArray[np.bool_]
    updates: NDArray[np.int64]
    seconds: Floats  # until the target, or until the budget was spent

    def of(self, instances: Sequence[int]) -> Times:
        """These rows."""
        some = list(instances)
        return Times(self.reached[some], self.updates[some], self.seconds[some])

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
    jobs: int = 1,
) -> dict[str, Times]:
    """Each instance under each policy, so many times with other chances.

    data: gives a set by its name. jobs: processes that play side by side. say: hears how far it is.
    """
    lots: list[list[int]] = []
    for numbers in _by_shape(instances).values():
        several = max(1, _together(instances[numbers[0]], data, device, jobs) // seeds)
        lots += [numbers[at : at + several] for at in range(0, len(numbers), several)]
    shape = (len(instances), seeds)
    found = {spec: Times(np.zeros(shape, bool), np.zeros(shape, int), np.zeros(shape)) for spec in specs}
    parts = [(spec, lot) for lot in lots for spec in specs]
    tables = {each.dataset: data(each.dataset) for each in instances}
    done = 0
    with pool_of(min(jobs, len(parts)), tables) as pool:
        asked = [(spec, _repeated(instances, lot, seeds), device) for spec, lot in parts]
        told = (
            pool.map(_there, asked)
            if pool
            else (_under(spec, some, tables[some[0].dataset], device) for spec, some, device in asked)
        )
        for (spec, lot), times in zip(parts, told, strict=True):
            for name, values in zip(("reached", "updates", "seconds"), times, strict=True):
                getattr(found[spec], name)[lot] = values.reshape(len(lot), seeds)
            done += len(lot)
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


def _by_shape(instances: Sequence[Instance]) -> dict[object, list[int]]:
    """The numbers of those that can be played at once."""
    found: dict[object, list[int]] = {}
    for number, each in enumerate(instances):
        shape = (each.workers, each.hidden, each.units, each.pooled, each.dataset, each.budget, each.batch)
        found.setdefault(shape, []).append(number)
    return found


def _together(instance: Instance, data: Callable[[str], Data], device: str, jobs: int) -> int:
    """How many episodes are played at once: as many as there is memory for, and on a CPU few, for its cache."""
    if torch.device(device).type == "cpu":
        return 60
    units, samples = instance.units, data(instance.dataset)
    inputs = samples.inputs[0].numel() // instance.pooled**2
    sizes = (inputs, *(units,) * instance.hidden, samples.classes)
    weights = sum(each * following for each, following in pairwise(sizes))
    held = 4 * (weights * (instance.workers + 5) + 3000 * units)
    return max(1, min(1500, int(MEMORY / jobs / held)))


def _repeated(instances: Sequence[Instance], lot: Sequence[int], seeds: int) -> list[Instance]:
    return [replace(instances[each], seed=instances[each].seed * 1000 + seed) for each in lot for seed in range(seeds)]


def _there(asked: tuple[str, list[Instance], str]) -> tuple[NDArray[Any], ...]:
    """In another process."""
    spec, instances, device = asked
    return _under(spec, instances, table(instances[0].dataset), device)


def _under(spec: str, instances: list[Instance], data: Data, device: str) -> tuple[NDArray[Any], ...]:
    """Was the target reached, after how many updates, and when."""
    policy = make(spec)
    if isinstance(policy, RLP):
        weights = load(policy.network)
        chooser = greedy(network_of(weights).to(device), weights.rules, len(instances), device)
        ended = play(instances, data, chooser, weights.state, device)
    else:
        ended = replay(instances, [update_order(instance, make(spec)) for instance in instances], data, device)
    return tuple(each.cpu().numpy() for each in (ended.reached, ended.updates, ended.seconds))
