"""The description of a cluster: machines, links, a model."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Literal

from paceline.model.codecs import encoded_size
from paceline.model.differences import way_back
from paceline.observe.driver import Fault
from paceline.simulate.network import Direction

FLOAT32 = 4  # bytes of a number of the model


@dataclass(frozen=True)
class Jitter:
    """How compute times vary.

    normal, lognormal: they are multiplied by a factor with mean 1 and relative standard deviation `sigma`.

    straggle: with `probability`, a worker also sleeps for a normally distributed time with `mean` and `deviation`, in
    seconds.

    delay: a worker also waits for a log-normal time of exp(`mu` + `sigma`·z) seconds, where z is normally distributed.
    """

    kind: Literal["none", "normal", "lognormal", "straggle", "delay"] = "none"
    sigma: float = 0.0
    mu: float = 0.0
    probability: float = 0.0
    mean: float = 0.0
    deviation: float = 0.0


@dataclass(frozen=True)
class WorkerSpec:
    """One worker. Its compute time is overhead + batch / samples_per_second, changed by jitter."""

    link: float  # bytes per second, each direction
    batch: int
    samples_per_second: float
    overhead: float = 0.0
    jitter: Jitter = Jitter()

    def compute_seconds(self, batch: float | None = None) -> float:
        """Return the compute time without jitter, for this batch or the usual one."""
        return self.overhead + (batch or self.batch) / self.samples_per_second

    def draw(self, batch: int, rng: random.Random) -> float:
        """Draw a compute time, with jitter."""
        seconds, jitter = self.overhead + batch / self.samples_per_second, self.jitter
        if jitter.kind == "lognormal":
            sigma = jitter.sigma
            return seconds * math.exp(sigma * rng.gauss(0.0, 1.0) - 0.5 * sigma * sigma)
        if jitter.kind == "normal":
            return seconds * max(0.05, rng.gauss(1.0, jitter.sigma))
        if jitter.kind == "straggle" and rng.random() < jitter.probability:
            return seconds + max(0.0, rng.gauss(jitter.mean, jitter.deviation))
        if jitter.kind == "delay":
            return seconds + math.exp(jitter.mu + jitter.sigma * rng.gauss(0.0, 1.0))
        return seconds


def worker_rng(worker: int, seed: int) -> random.Random:
    """Return the random generator of a worker's compute times.

    Each worker has its own, so that its compute times are the same under every policy.
    """
    return random.Random(f"{seed}:{worker}")


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster: its model, its servers, its workers and its faults."""

    name: str
    model_bytes: float
    servers: int  # K
    server_link: float  # B: bytes per second, each direction
    latency: float  # seconds, one way
    apply_rate: float  # bytes per second that the optimizer of one server processes
    lease: float  # seconds without a heartbeat before a worker is given up
    workers: tuple[WorkerSpec, ...]
    slices: int = 16  # slices of a streamed or pipelined model
    colocate: bool = False  # a server beside each worker instead of separate ones
    faults: tuple[Fault, ...] = ()
    server_link_in: float = 0.0  # rate into a server, if it differs from the rate out
    replicas: int = 0  # backups of each server's shard, on the host of the next server; 0 or 1
    local_steps: int = 1  # H: steps of a worker between two exchanges
    updates: str = ""  # the codec in which updates and models travel; "": float32
    overlap: bool = False  # a worker computes its next round while its update and the reply are on their way

    def with_jitter(self, sigma: float) -> ClusterSpec:
        """Return the same cluster with log-normal jitter on every worker."""
        jitter = Jitter("lognormal", sigma) if sigma else Jitter()
        return replace(self, workers=tuple(replace(worker, jitter=jitter) for worker in self.workers))

    def colocated(self) -> ClusterSpec:
        """Return the same cluster with a server beside each worker, and no separate ones."""
        return replace(self, colocate=True, servers=len(self.workers))

    def capacity(self, direction: Direction) -> float:
        """Return the rate of all servers' links together, into the servers or out of them."""
        link = (self.server_link_in or self.server_link) if direction == "in" else self.server_link
        return self.servers * link

    @property
    def update_bytes(self) -> float:
        """Bytes of an update."""
        return self._encoded_bytes(self.updates)

    @property
    def reply_bytes(self) -> float:
        """Bytes of a model that a worker pulls. Only its first pull is always float32."""
        return self._encoded_bytes(way_back(self.updates))

    def _encoded_bytes(self, codec: str) -> float:
        if not codec:
            return self.model_bytes
        return float(encoded_size(codec, math.ceil(self.model_bytes / FLOAT32)))

    @property
    def exchanges_gradients(self) -> bool:
        """Whether workers exchange float32 gradients in every step, and compute nothing meanwhile."""
        return self.local_steps == 1 and not self.updates and not self.overlap

    def round_batch(self, worker: WorkerSpec) -> int:
        """Return the samples that a worker computes between two exchanges, if its batches are not tuned."""
        return self.local_steps * worker.batch

    def round_seconds(self, worker: WorkerSpec, batch: int | None = None) -> float:
        """Return the compute time between two exchanges, without jitter. batch: the samples of the whole round."""
        return self.local_steps * worker.compute_seconds((batch or self.round_batch(worker)) / self.local_steps)

    def one_way(self, worker: WorkerSpec) -> float:
        """Return the seconds for which an update travels between a worker and the servers on idle links."""
        if self.colocate:  # the slice beside the worker does not travel
            return self.update_bytes * (len(self.workers) - 1) / len(self.workers) / worker.link
        return self.update_bytes / min(worker.link, self.servers * self.server_link)

    @property
    def apply_seconds(self) -> float:
        """Seconds of one optimizer step on all servers side by side."""
        return self.model_bytes / self.servers / self.apply_rate
