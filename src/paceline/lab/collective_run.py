"""Measures all-reduce algorithms on the servers of a fabric."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore

from paceline.collectives.reduce import AllReduce, gloo
from paceline.collectives.topology import Topology
from paceline.lab.fabric import Fabric
from paceline.lab.namespaces import LabError

GLOO = "gloo"  # the name of gloo's own all-reduce, over one NIC
PATIENCE = 120.0  # seconds that a step of an algorithm may take


@dataclass(frozen=True)
class CollectiveTrial:
    """One rank's part in the measurement of an algorithm."""

    net: Topology
    rank: int
    store: tuple[str, int]
    algorithm: str
    stages: tuple[str, ...]
    elements: int
    repeats: int
    nics: dict[int, str]
    patience: float


def measure(
    fabric: Fabric,
    algorithm: str,
    size: float,
    stages: Sequence[str] = ("ring",),
    repeats: int = 3,
    patience: float = PATIENCE,
) -> float:
    """Return the seconds from the first rank's start until the last rank has the sum.

    They are the median of `repeats` repetitions, after one that is not counted.
    """
    net = fabric.net
    store = fabric.nic_address(0, 0), secrets.randbelow(10_000) + 20_000
    trials = [
        CollectiveTrial(
            net,
            rank,
            store,
            algorithm,
            tuple(stages),
            max(1, round(size / 4)),
            repeats + 1,
            {port: fabric.nic_address(rank, port) for port in range(net.ports)},
            patience,
        )
        for rank in range(net.servers)
    ]
    spans = fabric.calls([(fabric.host(trial.rank), run_trial, (trial,)) for trial in trials])
    together = list(zip(*spans, strict=True))[1:]
    return float(median(max(end for _, end in each) - min(begin for begin, _ in each) for each in together))


def run_trial(trial: CollectiveTrial) -> list[tuple[float, float]]:
    """Run one rank's part. Return when each repetition began and ended."""
    torch.set_num_threads(1)
    wait = timedelta(seconds=trial.patience)
    count = trial.net.servers
    store = distributed.TCPStore(*trial.store, count, trial.rank == 0, timeout=wait)  # type: ignore[attr-defined]
    reduce = _reducer(trial, PrefixStore(trial.algorithm, store))
    flat = torch.empty(trial.elements)
    spans = []
    for repeat in range(trial.repeats):
        flat.fill_(trial.rank + 1)
        _barrier(store, f"begin/{repeat}", count, wait)
        began = time.monotonic()
        reduce(flat)
        spans.append((began, time.monotonic()))
        if not bool((flat == count * (count + 1) / 2).all()):
            raise LabError(f"{trial.algorithm} did not compute the sum on rank {trial.rank}.")
    if isinstance(reduce, AllReduce):
        reduce.close()
    _barrier(store, "end", count, wait)  # no rank closes its connections before all are done
    if trial.rank:
        store.add("gone", 1)
    while not trial.rank and store.add("gone", 0) < count - 1:  # rank 0 holds the store, so it ends last
        time.sleep(0.01)
    return spans


def _reducer(trial: CollectiveTrial, store: Any) -> Callable[[torch.Tensor], object]:
    if trial.algorithm != GLOO:
        return AllReduce(
            trial.net, trial.rank, store, trial.algorithm, trial.stages, timeout=trial.patience, nics=trial.nics
        )
    group = gloo(store, trial.rank, trial.net.servers, trial.patience, trial.nics[0])
    return lambda flat: group.allreduce([flat]).wait()


def _barrier(store: Any, name: str, count: int, wait: timedelta) -> None:
    """Wait until all ranks have reached the barrier of this name."""
    if store.add(f"{name}/here", 1) == count:
        store.set(f"{name}/go", "")
    store.wait([f"{name}/go"], wait)
