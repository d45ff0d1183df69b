"""Measures PyTorch's DDP on the hosts of a lab, as `run.py` measures a policy. Each host runs `ddp_baseline.py`."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from paceline.lab import ddp_baseline
from paceline.lab.hosts import worker_host
from paceline.lab.namespaces import Lab, LabError
from paceline.lab.plan import Cost, LabPlan, LabResult
from paceline.observe.summary import Gaps, Report
from paceline.simulate.cluster_spec import ClusterSpec

PATIENCE = 300.0  # seconds that a whole run may take


def run(lab: Lab, spec: ClusterSpec, plan: LabPlan, batches: Sequence[int] | None = None) -> LabResult:
    """Run DDP on the workers' hosts, and return the measurements. The policy of the plan is ignored.

    batches: the batch sizes of the workers; those of the cluster if left out.
    """
    batches = batches or [worker.batch for worker in spec.workers]
    store = lab.address(worker_host(0)), secrets.randbelow(10_000) + 20_000
    began, sent_before = time.perf_counter(), _sent(lab)
    pipes, processes = [], []
    for number, (worker, batch) in enumerate(zip(spec.workers, batches, strict=True)):
        rank = ddp_baseline.Rank(
            number, len(batches), store, worker, batch, spec.model_bytes, plan.iterations, plan.overlap, plan.seed
        )
        ours, theirs = lab.pipe()
        processes.append(lab.start(worker_host(number), _train, theirs, rank))
        theirs.close()
        pipes.append(ours)
    try:
        timed = [_receive(pipe, began + PATIENCE - time.perf_counter()) for pipe in pipes]
    finally:
        lab.stop(processes)
    counted = plan.iterations - plan.iterations // 4
    seconds = max(took for took, _ in timed)
    cost = Cost((_sent(lab) - sent_before) / 1e9 * counted / plan.iterations, sum(cpu for _, cpu in timed) * counted)
    report = Report(
        mean_iteration_seconds=seconds,
        samples_per_second=sum(batches) / seconds,
        blocking_seconds=0.0,
        blocking_by_worker={},
        communication_seconds=0.0,
        max_staleness=0,
        mean_staleness=0.0,
        max_progress_gap=0,
        update_gaps=Gaps(1.0, 0.0, 0.0, 0.0),
        batch_sizes=dict(enumerate(batches)),
        updates=plan.iterations,
        discarded=0,
        warm_up_iterations=plan.iterations // 4 * len(batches),
    )
    return LabResult(report, cost, time.perf_counter() - began)


def _sent(lab: Lab) -> int:
    """Return the bytes that all hosts have sent."""
    return sum(sent for sent, _ in lab.carried().values())


def _receive(pipe: Connection, seconds: float) -> tuple[float, float]:
    """Return the measurements of one rank. Raise LabError if there are none within `seconds`."""
    if not pipe.poll(max(0.0, seconds)):
        raise LabError(f"All-reduce between the hosts took longer than {PATIENCE:g} s; the links are too slow.")
    try:
        took, cpu = pipe.recv()
    except EOFError:
        raise LabError("All-reduce between the hosts failed; is torch built with gloo?") from None
    return took, cpu


def _train(pipe: Connection, rank: ddp_baseline.Rank) -> None:
    """Run one rank, and send its measurements. This is the main function of its process."""
    pipe.send(ddp_baseline.train(rank))
    os._exit(0)  # gloo's normal exit waits for the other ranks, which may have ended
