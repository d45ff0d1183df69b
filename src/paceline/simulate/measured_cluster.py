"""Clusters made of what was measured: how long a step takes on one machine, and which links there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.simulate.cluster_spec import ClusterSpec, Jitter, WorkerSpec

LATENCY = 50e-6  # seconds, one way, where nobody has measured it
APPLY = 10e9  # bytes per second
LEASE = 30.0
QUIET = 0.005  # a spread below this is none


@dataclass(frozen=True)
class StepTime:
    """One iteration of one machine."""

    seconds: float
    batch: int
    jitter: float  # relative spread
    model_bytes: float

    @property
    def spread(self) -> Jitter:
        return Jitter("lognormal", self.jitter) if self.jitter >= QUIET else Jitter()


def cluster_of(
    name: str, step: StepTime, links: Sequence[float], servers: int, server_link: float, latency: float = LATENCY
) -> ClusterSpec:
    """Workers with these links, all as fast as the machine that was measured."""
    workers = tuple(WorkerSpec(link, step.batch, step.batch / step.seconds, jitter=step.spread) for link in links)
    return ClusterSpec(name, step.model_bytes, servers, server_link, latency, APPLY, LEASE, workers)


def measured_as(spec: ClusterSpec, step: StepTime) -> ClusterSpec:
    """A cluster's links and proportions, with the model and the computing that were measured.

    The cluster's first worker counts as the machine that was measured, and the others keep their speed relative to it.
    A worker whose jitter is described keeps that. Faults are left out: advice is for a day on which nothing breaks.
    """
    own = [worker.compute_seconds() / worker.batch for worker in spec.workers]
    workers = tuple(
        replace(
            worker,
            batch=step.batch,
            samples_per_second=step.batch / step.seconds * own[0] / each,
            overhead=0.0,
            jitter=step.spread if worker.jitter.kind == "none" else worker.jitter,
        )
        for worker, each in zip(spec.workers, own, strict=True)
    )
    return replace(spec, model_bytes=step.model_bytes, workers=workers, faults=())
