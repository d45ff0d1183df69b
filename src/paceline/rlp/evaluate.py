"""Measures policies on the same instances, and compares their times with those of the best fixed policy."""

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
from paceline.rlp.rollout import follow, play
from paceline.rlp.rule_network import RulePlayer, greedy
from paceline.rlp.rules import NETWORK, RULES, named_rule, option_name
from paceline.rlp.update_order import update_order
from paceline.workloads.data import Data

FIXED = ("bsp", "asp", "ssp:staleness=2", "ssp:staleness=5", "ssp:staleness=8", "dssp", "r2sp")
CORRECTED = " corrected"  # suffix of a spec: staleness that the policy knows in advance is corrected
#: The wider yardstick: also the rules of RLP, each held from beginning to end, and schemes with options that help.
YARDSTICK = (
    *FIXED,
    *(f"rlp:rule={option_name(rule)}" for rule in RULES),
    *("ksync:k=5", "ksync:k=8", "kbatch:k=5", "kbatch:k=10"),
    *("r2sp corrected", "r2sp:groups=3", "r2sp:groups=3 corrected", "r2sp:groups=5 corrected"),
)
MEMORY = 40e9  # bytes of GPU memory to count on; the caching allocators of all processes hold about twice as much

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Times:
    """The outcomes of a policy, with a row for each instance and a column for each seed."""

    reached: NDArray[np.bool_]
    updates: NDArray[np.int64]
    seconds: Floats  # until the target, or until the budget was spent

    def of(self, instances: Sequence[int]) -> Times:
        """Return the rows of these instances."""
        some = list(instances)
        return Times(self.reached[some], self.updates[some], self.seconds[some])

    @property
    def mean(self) -> Floats:
        """The mean time of each instance."""
        found: Floats = self.seconds.mean(1)
        return found


def judged(
    instances: Sequence[Instance],
    seeds: int,
    specs: Sequence[str],
    data: Callable[[str], Data],
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
    jobs: int = 1,
) -> dict[str, Times]:
    """Play each instance under each policy with `seeds` seeds. Return the times of each policy.

    data: returns a dataset by its name. progress: called with the number of instances that are done, and of all.
    jobs: the number of processes that play episodes.
    """
    parts: list[tuple[str, list[int]]] = []
    for numbers in _by_shape(instances).values():
        for spec in specs:
            episodes = _episodes_at_once(instances[numbers[0]], data, device, jobs, spec.endswith(CORRECTED))
            at_once = max(1, episodes // seeds)
            parts += [(spec, numbers[at : at + at_once]) for at in range(0, len(numbers), at_once)]
    shape = (len(instances), seeds)
    found = {spec: Times(np.zeros(shape, bool), np.zeros(shape, int), np.zeros(shape)) for spec in specs}
    tables = {each.dataset: data(each.dataset) for each in instances}
    done = 0
    with pool_of(min(jobs, len(parts)), tables) as pool:
        tasks = [(spec, _repeated(instances, lot, seeds), device) for spec, lot in parts]
        outcomes = (
            pool.map(_play_in_pool, tasks)
            if pool
            else (_play_under(spec, some, tables[some[0].dataset], device) for spec, some, device in tasks)
        )
        for (spec, lot), times in zip(parts, outcomes, strict=True):
            for name, values in zip(("reached", "updates", "seconds"), times, strict=True):
                getattr(found[spec], name)[lot] = values.reshape(len(lot), seeds)
            done += len(lot)
            if progress:
                progress(done, len(instances) * len(specs))
    return found


def is_fixed(spec: str) -> bool:
    """Return whether a policy chooses nothing by a network."""
    return not spec.startswith("rlp") or "rule=" in spec


def ratios(times: dict[str, Times]) -> dict[str, Floats]:
    """Return, for each instance, the time of each policy relative to the best fixed policy's."""
    best = np.min([each.mean for spec, each in times.items() if is_fixed(spec)], axis=0)
    return {spec: each.mean / best for spec, each in times.items()}


def best_fixed(times: dict[str, Times]) -> list[str]:
    """Return the best fixed policy of each instance."""
    fixed = [spec for spec in times if is_fixed(spec)]
    return [fixed[at] for at in np.argmin([times[spec].mean for spec in fixed], axis=0)]


def interval(values: Floats) -> float:
    """Return half the width of the 95% confidence interval of the mean."""
    return 1.96 * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _by_shape(instances: Sequence[Instance]) -> dict[object, list[int]]:
    """Group the numbers of instances by shape. Instances of one shape can be played at once."""
    found: dict[object, list[int]] = {}
    for number, each in enumerate(instances):
        shape = (each.workers, each.hidden, each.units, each.pooled, each.dataset, each.budget, each.batch)
        found.setdefault(shape, []).append(number)
    return found


def _episodes_at_once(
    instance: Instance, data: Callable[[str], Data], device: str, jobs: int, corrected: bool = False
) -> int:
    """Return the number of episodes to play at once. They fit the memory of a GPU, or the cache of a CPU.

    corrected: whether staleness is corrected, which needs more models for each episode.
    """
    if torch.device(device).type == "cpu":
        return 60
    units, samples = instance.units, data(instance.dataset)
    inputs = samples.inputs[0].numel() // instance.pooled**2
    sizes = (inputs, *(units,) * instance.hidden, samples.classes)
    weights = sum(each * following for each, following in pairwise(sizes))
    models = instance.workers + 5 + corrected * (2 + instance.workers)
    held = 4 * (weights * models + 3000 * units)
    return max(1, min(1500, int(MEMORY / jobs / held)))


def _repeated(instances: Sequence[Instance], lot: Sequence[int], seeds: int) -> list[Instance]:
    """Return the instances of a lot, each with `seeds` seeds."""
    return [replace(instances[each], seed=instances[each].seed * 1000 + seed) for each in lot for seed in range(seeds)]


def _play_in_pool(task: tuple[str, list[Instance], str]) -> tuple[NDArray[Any], ...]:
    """Play a task in a process of the pool."""
    spec, instances, device = task
    return _play_under(spec, instances, table(instances[0].dataset), device)


def _play_under(spec: str, instances: list[Instance], data: Data, device: str) -> tuple[NDArray[Any], ...]:
    """Play instances under a policy. Return whether each reached the target, the number of updates, and the time."""
    plain = spec.removesuffix(CORRECTED)
    policy = make(plain)
    if isinstance(policy, RLP):
        weights = load(policy.network)
        if policy.rule == NETWORK:
            chooser = greedy(weights, len(instances), device)
        else:
            held = torch.zeros(len(instances), dtype=torch.int64, device=device)
            chooser = RulePlayer(None, (named_rule(policy.rule),), held)
        episodes = play(instances, data, chooser, weights.state, device)
    else:
        orders = [update_order(instance, make(plain)) for instance in instances]
        episodes = follow(instances, orders, data, device, corrected=plain != spec)
    return tuple(each.cpu().numpy() for each in (episodes.reached, episodes.updates, episodes.seconds))
