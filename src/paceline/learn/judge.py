"""How good policies are: their times on the same instances, beside those of the best fixed one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from paceline.learn.instance import Instance
from paceline.learn.order import Order, order
from paceline.learn.rollout import Episodes, replay
from paceline.policies import make
from paceline.workloads.data import Data

FIXED = ("bsp", "asp", "ssp:staleness=2", "ssp:staleness=5", "ssp:staleness=8", "dssp", "r2sp")


def repeated(instances: Sequence[Instance], seeds: int) -> list[Instance]:
    """Each instance so many times: the same cluster and training, with other chances."""
    return [replace(each, seed=each.seed * 1000 + seed) for each in instances for seed in range(seeds)]


def _order(asked: tuple[Instance, str]) -> Order:
    instance, spec = asked
    return order(instance, make(spec))


def fixed_times(instances: Sequence[Instance], specs: Sequence[str], data: Data, device: str) -> list[Episodes]:
    """Of instances of one shape, under each of these policies."""
    asked = [(instance, spec) for spec in specs for instance in instances]
    if len(asked) > 8 and (os.cpu_count() or 1) > 2:
        with ProcessPoolExecutor() as pool:
            orders = list(pool.map(_order, asked, chunksize=16))
    else:
        orders = [_order(each) for each in asked]
    episodes = replay([instance for instance, _ in asked], orders, data, device)
    count = len(instances)
    return [
        Episodes(*(getattr(episodes, name)[at : at + count].cpu() for name in ("reached", "updates", "seconds")))
        for at in range(0, len(asked), count)
    ]
