"""Faults of a simulated job, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "kill worker",
    "stop worker",
    "cut worker",
    "twin",
    "stop server",
    "kill server",
    "stop shard",
    "kill shard",
    "full disk",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
WORKER_FAULTS = frozenset[Kind]({"kill worker", "stop worker", "cut worker", "twin"})
WEIGHTS = (4, 3, 6, 3, 3, 3, 1, 2, 1)
RECOVERY_WEIGHTS = (4, 2, 4, 1, 2, 6, 1, 5, 1)  # of faults that follow another one


@dataclass(frozen=True)
class ScheduledFault:
    """A fault that strikes a worker or a shard at a time.

    seconds: for how long a process is stopped; or how soon at the latest both ends notice that a connection is lost; or
    how long it takes until a killed process is restarted.
    """

    time: float
    kind: Kind
    target: int
    seconds: float


def draw_faults(rng: random.Random, workers: int, until: float, lease: float) -> tuple[ScheduledFault, ...]:
    """Return some faults before this time. In a third of the cases, most of them strike one worker and the server."""
    count = rng.choice((0, 1, 2, 3, 4, 6, 8, 12))
    victim = rng.randrange(workers) if rng.random() < 1 / 3 else None
    kinds = KINDS
    weights = WEIGHTS if victim is None else (4, 2, 8, 8, 2, 8, 0, 2, 0)
    faults = []
    for _ in range(count):
        kind = rng.choices(kinds, weights)[0]
        target = victim if victim is not None and rng.random() < 0.8 else rng.randrange(workers)
        seconds = rng.choice((0.1, 0.6, 1.2, 2.5)) * lease * rng.random()
        faults.append(ScheduledFault(rng.uniform(0.0, until), kind, target, seconds))
    return tuple(sorted(faults, key=lambda fault: fault.time))


def add_second_faults(
    rng: random.Random, faults: tuple[ScheduledFault, ...], workers: int, lease: float
) -> tuple[ScheduledFault, ...]:
    """Return these faults and others that follow some of them: at the same time, or while the job recovers."""
    second = []
    for fault in faults:
        while rng.random() < 0.4:
            kind = rng.choices(KINDS, RECOVERY_WEIGHTS)[0]
            wait = rng.choice((0.0, 0.01, 0.3, 1.0)) * rng.random() * lease
            if rng.random() < 0.5 and fault.kind in ("kill server", "kill worker"):
                wait += fault.seconds  # when the process is restarted
            seconds = rng.choice((0.1, 0.6, 1.2)) * lease * rng.random()
            fault = ScheduledFault(fault.time + wait, kind, rng.randrange(workers), seconds)
            second.append(fault)
    return tuple(sorted((*faults, *second), key=lambda fault: fault.time))
