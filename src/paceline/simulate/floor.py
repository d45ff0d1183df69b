"""The floor: the shortest mean time of an iteration that the links and the workers of a cluster allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.policies import Policy
from paceline.simulate.cluster import SimulationResult
from paceline.simulate.cluster_spec import ClusterSpec, WorkerSpec

HALVINGS = 60  # of the interval in which the rate of a colocated cluster lies


def limit_seconds(
    spec: ClusterSpec, streamed: bool, overlap: bool = False, batches: Mapping[int, int] | None = None
) -> float:
    """Return the floor: N workers, divided by the most updates per second that any policy can get from the cluster.

    Workers need not make equally many updates. Each is limited by its own path: compute, push, pull, and four messages.
    All together are limited by the links: every update crosses them once in each direction. Jitter and the servers'
    optimizer steps are left out, because a policy can avoid a part of them. With local steps, an iteration is a round.

    overlap: gradients are sent while they are computed, in the last two thirds of the compute time. This changes
    nothing for whole updates. It is not the overlap of a cluster's description, with which a worker computes its next
    round during the exchange.

    batches: worker → its batch size, where a policy has tuned it.

    With replicas, every update also crosses the link out of its shard's host, and the link into the host of the backup:
    that of the next server, or one of its own where there is one server.
    """
    N, tuned = len(spec.workers), batches or {}
    most = [
        1 / _path(spec, worker, tuned.get(number, spec.round_batch(worker)), streamed, overlap)
        for number, worker in enumerate(spec.workers)
    ]
    if spec.colocate:
        return N / _colocated_rate(spec, most)
    received = 1 + spec.replicas * (spec.servers > 1)  # models that cross the links into the servers for an update
    sent = spec.reply_bytes + spec.replicas * spec.update_bytes
    busiest = max(received * spec.update_bytes / spec.capacity("in"), sent / spec.capacity("out"))
    return max(N / sum(most), N * busiest)


def run_limit_seconds(spec: ClusterSpec, policy: Policy, result: SimulationResult) -> float | None:
    """Return the floor of a simulated run, with the batch sizes that its policy has chosen.

    There is none if workers came and went, because the links were shared by fewer of them, nor if workers computed
    several updates from one pull (`kbatch`, `fedbuff`). A pipelined barrier has the floor of streamed updates, since it
    returns slices as they arrive.
    """
    if spec.faults or result.pulls_saved:
        return None
    return limit_seconds(spec, result.streamed or policy.pipelined, batches=result.report.batch_sizes)


def _path(spec: ClusterSpec, worker: WorkerSpec, batch: int, streamed: bool, overlap: bool) -> float:
    """Return the time of a worker's iteration if it has the network for itself."""
    compute, update, reply = spec.round_seconds(worker, batch), spec.update_bytes, spec.reply_bytes
    if spec.colocate:  # the slice beside the worker does not travel
        share = (len(spec.workers) - 1) / len(spec.workers)
        push, pull = share * update / worker.link, share * reply / worker.link
    else:
        push = update / min(worker.link, spec.capacity("in"))
        pull = reply / min(worker.link, spec.capacity("out"))
    if spec.overlap:
        back = max(pull / spec.slices, pull - push) if streamed else pull
        return max(compute, push + back + 4 * spec.latency)
    if not streamed:
        return compute + push + pull + 4 * spec.latency
    # The first slices come back while the last ones are pushed. Only the last slice is pulled after the push.
    pushed = max(compute, compute / 3 + push) if overlap else compute + push
    return pushed + max(pull / spec.slices, pull - push) + 4 * spec.latency


def _colocated_rate(spec: ClusterSpec, most: Sequence[float]) -> float:
    """Return the most updates per second with a server beside each worker, for workers that make `most` at best.

    An update of worker j crosses its own link with (N−1)/N of the model, and every other link with 1/N of it, in each
    direction. So if all workers make R updates per second, worker j can make (room[j] − R)/(N−2) at most.

    With replicas, every link also carries 1/N of the model for each update, from a shard to its backup.
    """
    N, crossed = len(spec.workers), 1 + spec.replicas * (len(spec.workers) > 1)
    room = [worker.link * N / max(spec.update_bytes, spec.reply_bytes) for worker in spec.workers]
    low, high = 0.0, sum(most) if N == 1 else min(sum(most), *(free / crossed for free in room))
    if N <= 2 and not spec.replicas:
        return high
    for _ in range(HALVINGS):
        R = (low + high) / 2
        shares = (_share(own, free - crossed * R, N - 2) for own, free in zip(most, room, strict=True))
        if sum(shares) >= R:
            low = R
        else:
            high = R
    return high


def _share(own: float, free: float, others: int) -> float:
    """Return the most updates per second of one worker, if `free` of them are left on its link for `others` slices."""
    if others <= 0:
        return own if free >= 0 else 0.0
    return min(own, free / others)
