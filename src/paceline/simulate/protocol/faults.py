"""What goes wrong in a simulated job, drawn from a seed."""

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
TO_WORKERS = frozenset[Kind]({"kill worker", "stop worker", "cut worker", "twin"})
WEIGHTS = (4, 3, 6, 3, 3, 3, 1, 2, 1)


@dataclass(frozen=True)
class ScheduledFault:
    """Something that happens at a time, to a worker or a shard of this number.

    seconds: for how long a process is stopped; for how long at most nobody notices that a connection is cut; after how
    long a process that was killed is started again.
    """

    time: float
    kind: Kind
    target: int
    seconds: float


def draw_faults(chance: random.Random, workers: int, until: float, lease: float) -> tuple[ScheduledFault, ...]:
    """Some faults before this time. In one of three draws most of them strike the same worker and the server."""
    count = chance.choice((0, 1, 2, 3, 4, 6, 8, 12))
    victim = chance.randrange(workers) if chance.random() < 1 / 3 else None
    kinds = KINDS
    weights = WEIGHTS if victim is None else (4, 2, 8, 8, 2, 8, 0, 2, 0)
    faults = []
    for _ in range(count):
        kind = chance.choices(kinds, weights)[0]
        target = victim if victim is not None and chance.random() < 0.8 else chance.randrange(workers)
        seconds = chance.choice((0.1, 0.6, 1.2, 2.5)) * lease * chance.random()
        faults.append(ScheduledFault(chance.uniform(0.0, until), kind, target, seconds))
    return tuple(sorted(faults, key=lambda fault: fault.time))
