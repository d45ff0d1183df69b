"""Random faults from a seed. The same seed breaks the same machines at the same times."""

from __future__ import annotations

import random
from dataclasses import replace

from paceline.observe.driver import Fault
from paceline.simulate.cluster_spec import ClusterSpec
from paceline.simulate.floor import limit_seconds


def with_random_faults(spec: ClusterSpec, count: int, iterations: int, seed: int) -> ClusterSpec:
    """Return the same cluster with `count` more faults, spread over a run of this number of iterations.

    A killed worker rejoins after a while. Pauses and cuts last up to twice the lease.
    """
    draw = random.Random(f"{seed}:faults")
    slowest = max(spec.workers, key=lambda worker: worker.compute_seconds() + 2 * spec.one_way(worker))
    span = iterations * limit_seconds(replace(spec, workers=(slowest,) * len(spec.workers)), streamed=False)
    faults: list[Fault] = []
    for _ in range(count):
        time, worker = draw.uniform(0.0, span), draw.randrange(len(spec.workers))
        kind = draw.choice(("kill", "pause", "cut"))
        if kind == "kill":
            faults.append(Fault(time, worker, "kill"))
            faults.append(Fault(time + draw.uniform(0.0, 2 * spec.lease), worker, "rejoin"))
        elif kind == "pause":
            faults.append(Fault(time, worker, "pause", draw.uniform(0.0, 2 * spec.lease)))
        else:
            faults.append(Fault(time, worker, "cut", draw.uniform(0.0, 2 * spec.lease)))
    return replace(spec, faults=spec.faults + tuple(faults))
