"""The conformance suite with Flower's in-memory grid as one more driver, in virtual time.

Every run has the policies of federations with one job. All other cases are in the matrix.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed; `make test-flower` installs it")

from flwr.serverapp.strategy import FedAvg

from conformance.judge import Judge, judge_of
from conformance.test_conformance import JOBS
from conformance.test_conformance import POLICIES as ALL
from on_flower.runs import FEDERATED, VirtualRun, policies, sampled
from on_flower.virtual import VirtualClock, VirtualGrid, VirtualNode
from paceline.observe.driver import Fault, Job
from paceline.observe.trace import Event, as_line

POLICIES = [spec for spec in ALL if "tune_batches" not in spec]  # a node has a batch of its own

#: Flower cannot cut a link or pause a node from outside; here a node disconnects, and later it comes back.
FAULTS = {
    "one leaves and comes back": (Fault(3.3, 1, "kill"), Fault(25.0, 1, "rejoin")),
    "all but one": tuple(Fault(4.0 + worker / 10, worker, "kill") for worker in (0, 1, 2)),
    "all, one after the other": tuple(
        fault
        for worker in range(4)
        for fault in (Fault(4.0 + worker, worker, "kill"), Fault(14.0 + worker, worker, "rejoin"))
    ),
}


def on_flower(spec: str, job: Job) -> list[Event]:
    """Drive a policy through a job on Flower's in-memory grid. Return the trace."""
    chance = np.random.default_rng(job.seed)

    def train(arrays: dict[str, Any], trained: int) -> dict[str, Any]:
        return {"w": arrays["w"] + chance.normal(size=3).astype(np.float32)}

    nodes = [VirtualNode(seconds, train) for seconds in job.compute_seconds]
    wraps = FedAvg(min_available_nodes=1, min_train_nodes=1, fraction_evaluate=0.0)
    run = VirtualRun(spec, nodes, wraps, grid=VirtualGrid(VirtualClock(), nodes), interval=0.05)
    for fault in job.faults:
        act = run.grid.disconnect if fault.kind == "kill" else run.grid.connect
        run.grid.clock.at(fault.time, lambda act=act, node=nodes[fault.worker]: act(node))  # type: ignore[misc]
    run.start(rounds=job.iterations)
    return run.events


def judged(spec: str, job: Job) -> tuple[list[Event], Judge]:
    events = on_flower(spec, job)
    return events, judge_of(spec).watch(events)


@pytest.mark.parametrize(
    ("spec", "job"),
    sampled(*product(POLICIES, sorted(JOBS)), always=lambda case: case[0] in FEDERATED and case[1] == "mixed"),
)
def test_the_trace_is_valid_and_the_policy_keeps_its_promise(spec: str, job: str) -> None:
    _, judge = judged(spec, JOBS[job])
    workers = len(JOBS[job].compute_seconds)
    assert judge.version > 0
    assert judge.discarded + judge.applied + len(judge.waiting) <= judge.arrivals
    assert judge.arrivals >= (JOBS[job].iterations - 2) * workers, "a node that is left out does not count"
    assert len(judge.waiting) <= max(workers, 7), "more updates are undecided than members and K explain"
    assert min(judge.granted_ever[worker] for worker in range(workers)) >= JOBS[job].iterations // 4
    assert judge.departures == 0


@pytest.mark.parametrize(
    ("spec", "faults"),
    sampled(*product(POLICIES, FAULTS), always=lambda case: case[0] in FEDERATED and case[1].startswith("one")),
)
def test_the_promise_holds_when_nodes_leave(spec: str, faults: str) -> None:
    _, judge = judged(spec, Job((1.0, 1.2, 1.0, 2.0), iterations=14, seed=3, faults=FAULTS[faults]))
    assert judge.departures > 0
    assert judge.version > 0


@pytest.mark.parametrize("spec", policies(POLICIES))
def test_the_same_job_gives_the_same_trace(spec: str) -> None:
    job = Job((1.0, 1.2, 1.0, 2.0), iterations=8, faults=FAULTS["one leaves and comes back"])
    first, again = ([as_line(event) for event in on_flower(spec, job)] for _ in range(2))
    assert first == again
