"""A cluster as it is described: machines, links, a model; and the floor of what it allows."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Literal

from paceline.observe.driver import Fault
from paceline.simulate.network import Direction


@dataclass(frozen=True)
class Jitter:
    """How compute times vary.

    normal, lognormal: times a factor of mean 1 and relative spread `sigma`.
    straggle: with `probability`, sleep a normal time of `mean` and `deviation` seconds besides.
    delay: wait for a log-normal time of exp(`mu` + `sigma`·z) seconds besides, z being normal.
    """

    kind: Literal["none", "normal", "lognormal", "straggle", "delay"] = "none"
    sigma: float = 0.0
    mu: float = 0.0
    probability: float = 0.0
    mean: float = 0.0
    deviation: float = 0.0


@dataclass(frozen=True)
class WorkerSpec:
    """One worker. Compute time = overhead + batch / samples_per_second, and jitter."""

    link: float  # bytes per second, each direction
    batch: int
    samples_per_second: float
    overhead: float = 0.0
    jitter: Jitter = Jitter()

    def compute_seconds(self, batch: int | None = None) -> float:
        """Without jitter."""
        return self.overhead + (batch or self.batch) / self.samples_per_second

    def draw(self, batch: int, chance: random.Random) -> float:
        """A compute time, jitter and all."""
        seconds, jitter = self.overhead + batch / self.samples_per_second, self.jitter
        if jitter.kind == "lognormal":
            sigma = jitter.sigma
            return seconds * math.exp(sigma * chance.gauss(0.0, 1.0) - 0.5 * sigma * sigma)
        if jitter.kind == "normal":
            return seconds * max(0.05, chance.gauss(1.0, jitter.sigma))
        if jitter.kind == "straggle" and chance.random() < jitter.probability:
            return seconds + max(0.0, chance.gauss(jitter.mean, jitter.deviation))
        if jitter.kind == "delay":
            return seconds + math.exp(jitter.mu + jitter.sigma * chance.gauss(0.0, 1.0))
        return seconds


def chance_of(worker: int, seed: int) -> random.Random:
    """What a worker's compute times are drawn from: its own, so that they are the same under every policy."""
    return random.Random(f"{seed}:{worker}")


@dataclass(frozen=True)
class ClusterSpec:
    """A whole cluster."""

    name: str
    model_bytes: float
    servers: int  # K
    server_link: float  # B: bytes per second, each direction
    latency: float  # seconds, one way
    apply_rate: float  # bytes per second that one server's optimizer gets through
    lease: float  # seconds of silence after which a worker is given up
    workers: tuple[WorkerSpec, ...]
    slices: int = 16  # that a model is cut into where it is streamed or pipelined
    colocate: bool = False  # a server beside each worker, instead of separate ones
    faults: tuple[Fault, ...] = ()
    server_link_in: float = 0.0  # what a server takes in, where that is not what it gives out

    def with_jitter(self, sigma: float) -> ClusterSpec:
        """The same cluster with log-normal jitter on every worker."""
        jitter = Jitter("lognormal", sigma) if sigma else Jitter()
        return replace(self, workers=tuple(replace(worker, jitter=jitter) for worker in self.workers))

    def colocated(self) -> ClusterSpec:
        """The same cluster with a server beside each worker and none apart."""
        return replace(self, colocate=True, servers=len(self.workers))

    def capacity(self, direction: Direction) -> float:
        """What all servers' links carry together, into them or out."""
        link = (self.server_link_in or self.server_link) if direction == "in" else self.server_link
        return self.servers * link

    def one_way(self, worker: WorkerSpec) -> float:
        """Seconds that the whole model takes from the servers to a worker, or back, with nobody else on the links."""
        if self.colocate:  # what is beside the worker need not travel
            return self.model_bytes * (len(self.workers) - 1) / len(self.workers) / worker.link
        return self.model_bytes / min(worker.link, self.servers * self.server_link)

    @property
    def apply_seconds(self) -> float:
        """One optimizer step, on all servers side by side."""
        return self.model_bytes / self.servers / self.apply_rate


def limit_seconds(spec: ClusterSpec, streamed: bool, overlap: bool = False) -> float:
    """The floor: no scheme that applies every worker's update by itself can make a round shorter (docs/benchmarks.md).

    The larger of the slowest worker's own path, the busiest link, and the servers' own work.
    overlap: are gradients sent while they come out, in the last two thirds of computing? Whole, it makes no difference.
    """
    N, a = len(spec.workers), spec.apply_seconds
    paths = []
    for worker in spec.workers:
        there = spec.one_way(worker)
        if streamed:
            compute = worker.compute_seconds()
            busy = max(compute, compute / 3 + there) if overlap else compute + there
            paths.append(busy + (there + a) / spec.slices + 4 * spec.latency)
        else:
            # The servers' step and the messages' way take place at the same time.
            paths.append(worker.compute_seconds() + 2 * there + max(a, 4 * spec.latency))
    if spec.colocate:
        links = max(2 * spec.one_way(worker) for worker in spec.workers)
    else:
        links = N * spec.model_bytes / min(spec.capacity("in"), spec.capacity("out"))
    return max(max(paths), links, N * a)
