"""Estimates: the expected speed and staleness of a candidate on a cluster.

Policies are simulated. All-reduce has a closed formula. The staleness of a candidate has a price: the factor by which
it increases the number of samples that training needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.advise.candidates import DDP, DILOCO, Candidate
from paceline.model.correction import chosen as correction
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.policies import make
from paceline.simulate import Cluster, ClusterSpec, run_limit_seconds
from paceline.simulate.cluster_spec import worker_rng
from paceline.simulate.compute_times import ComputeTimes
from paceline.simulate.link_use import LinkUse

BUCKET = 25 * 2**20  # DistributedDataParallel's default bucket size, in bytes
BACKWARD = 2 / 3  # share of the compute time that is the backward pass
FEW = 4  # staleness up to which hardly any optimizer needs more samples; a few groups have about that much


@dataclass(frozen=True)
class Estimate:
    """The expected speed and staleness of a candidate."""

    candidate: Candidate
    iteration_seconds: float  # of a round, with local steps
    samples_per_second: float
    mean_staleness: float = 0.0
    max_staleness: int = 0
    busy: tuple[float, float] | None = None  # mean utilization of the servers' links, in and out
    floor_seconds: float | None = None  # the least that the cluster allows for an iteration
    price: float = 1.0  # samples that training needs, relative to training without staleness

    @property
    def effective_rate(self) -> float:
        """Samples per second, divided by the price of the staleness."""
        return self.samples_per_second / self.price


def estimate(
    spec: ClusterSpec,
    candidate: Candidate,
    iterations: int,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
    optimizer: OptimizerSpec | None = None,
) -> Estimate:
    """Return the estimate for a candidate on a cluster. Policies are simulated; all-reduce is calculated."""
    described = candidate.on(spec)
    if candidate.policy == DDP:
        return _all_reduce(described, iterations, seed)
    if candidate.policy == DILOCO:
        return _diloco(described, candidate, iterations, seed)
    use = None if candidate.colocated else LinkUse()
    policy = make(candidate.policy)
    if candidate.colocated or candidate.streamed or policy.pipelined:
        described = replace(described, replicas=0)  # only whole updates of separate servers are simulated with backups
    result = Cluster(described, policy, iterations, seed, candidate.streamed, use).run(progress)
    report, seconds = result.report, result.simulated_seconds
    return Estimate(
        candidate,
        report.mean_iteration_seconds,
        report.samples_per_second,
        report.mean_staleness,
        report.max_staleness,
        (use.mean("in", 0.0, seconds), use.mean("out", 0.0, seconds)) if use else None,
        run_limit_seconds(described, policy, result),
        staleness_price(candidate.policy, report.mean_staleness, optimizer),
    )


def staleness_price(policy: str, staleness: float, optimizer: OptimizerSpec | None) -> float:
    """Return the factor by which staleness increases the samples that training needs.

    The factors are round figures. They were measured with AlexNet and VGG16 on CIFAR-10 and 16 workers, each scheme at
    its own best learning rate (docs/learning.md). The staleness of R²SP is known in advance, so the server corrects
    for it where the optimizer has momentum. Without that correction, a staleness of sixteen versions prevents a model
    from learning at all.
    """
    if staleness < 0.05:
        return 1.0
    momentum = optimizer is not None and correction("auto", optimizer) == "full"
    if policy.startswith("r2sp"):
        adam = momentum and optimizer is not None and optimizer.name != "SGD"
        return 1.2 if adam and staleness > FEW else 1.05
    return 2.0 if momentum else 1.15


def _all_reduce(spec: ClusterSpec, iterations: int, seed: int) -> Estimate:
    """Return the estimate for a ring all-reduce over the workers.

    Each link carries 2(N−1)/N of the model, and each iteration waits for the slowest worker. A bucket is reduced as
    soon as the backward pass has filled it. So a model of one bucket is sent after the whole backward pass. Of a model
    with many buckets, only the first must be computed before the network starts, and only the last is sent after the
    backward pass.
    """
    N = len(spec.workers)
    buckets = max(1, math.ceil(spec.model_bytes / BUCKET))
    compute = slowest_compute(spec, iterations, seed)
    network = 2 * (N - 1) / N * spec.model_bytes / min(worker.link for worker in spec.workers)
    backward = BACKWARD * compute
    seconds = compute - backward + max(backward + network / buckets, backward / buckets + network)
    seconds += 2 * (N - 1) * spec.latency
    return Estimate(Candidate(DDP), seconds, sum(worker.batch for worker in spec.workers) / seconds)


def _diloco(spec: ClusterSpec, candidate: Candidate, iterations: int, seed: int) -> Estimate:
    """Return the estimate for a ring all-reduce of the workers' differences, once in a round of local steps.

    They are sent in float32. If the exchange is overlapped, the workers compute their next round meanwhile, and add it
    to the result.
    """
    N = len(spec.workers)
    network = 2 * (N - 1) / N * spec.model_bytes / min(worker.link for worker in spec.workers)
    network += 2 * (N - 1) * spec.latency
    slowest = _slowest_computes(spec, iterations, seed)
    rounds = [max(each, network) if candidate.overlap else each + network for each in slowest]
    seconds = sum(rounds) / iterations
    samples = sum(spec.round_batch(worker) for worker in spec.workers)
    return Estimate(candidate, seconds, samples / seconds)


def slowest_compute(spec: ClusterSpec, iterations: int, seed: int = 0) -> float:
    """Return the longest compute time among the workers, averaged over the iterations."""
    return sum(_slowest_computes(spec, iterations, seed)) / iterations


def _slowest_computes(spec: ClusterSpec, iterations: int, seed: int) -> list[float]:
    """Return the longest compute time among the workers in each iteration."""
    times = [
        (ComputeTimes(worker, worker_rng(number, seed), spec.local_steps), spec.round_batch(worker))
        for number, worker in enumerate(spec.workers)
    ]
    return [max(each.draw(batch) for each, batch in times) for _ in range(iterations)]
