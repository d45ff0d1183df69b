"""Clusters made from measurements: the time of a step on one machine, and the rates of links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.simulate.cluster_spec import ClusterSpec, Jitter, WorkerSpec

LATENCY = 50e-6  # seconds, one way, if it was not measured
APPLY_RATE = 10e9  # bytes per second
LEASE = 30.0
NO_JITTER_BELOW = 0.005  # a spread below this counts as no jitter


@dataclass(frozen=True)
class StepTime:
    """The measured time of one iteration on one machine."""

    seconds: float
    batch: int
    jitter: float  # relative standard deviation
    model_bytes: float

    @property
    def spread(self) -> Jitter:
        """The measured jitter, as the description of a worker has it."""
        return Jitter("lognormal", self.jitter) if self.jitter >= NO_JITTER_BELOW else Jitter()


def cluster_of(
    name: str, step: StepTime, links: Sequence[float], servers: int, server_link: float, latency: float = LATENCY
) -> ClusterSpec:
    """Return a cluster of workers with these links, all as fast as the measured machine."""
    workers = tuple(WorkerSpec(link, step.batch, step.batch / step.seconds, jitter=step.spread) for link in links)
    return ClusterSpec(name, step.model_bytes, servers, server_link, latency, APPLY_RATE, LEASE, workers)


def measured_as(spec: ClusterSpec, step: StepTime) -> ClusterSpec:
    """Return a cluster with its links and proportions, but with the measured model and compute time.

    The first worker of the cluster counts as the measured machine. The others keep their speed relative to it. A worker
    that is described with jitter keeps it. Faults are left out, because advice is for a run without any.
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
