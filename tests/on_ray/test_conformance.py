"""The conformance suite with Ray as one more driver. Each job takes seconds, so most policies are in the matrix."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed; `make test-ray` installs it")

from ray.train import RunConfig, ScalingConfig

from conformance.judge import judge_of
from conformance.served import until_goal
from conformance.test_conformance import JOBS, RUNS
from on_ray import loops
from paceline.observe.driver import Job
from paceline.observe.trace import Began, Event, from_line
from paceline.policies import make
from paceline.ray import PacelineTrainer

pytestmark = pytest.mark.usefixtures("cluster")


#: Exchanges for each update that must arrive. A worker does not know whether the policy has cancelled its iteration.
MORE = 4


def on_ray(spec: str, job: Job, streamed: bool, folder: Path) -> list[Event]:
    """Drive a policy through a job on Ray. Return the trace until the job's iterations have arrived."""
    goal = job.iterations * len(job.compute_seconds)
    exchanges = MORE * goal
    result = PacelineTrainer(
        loops.exchange,
        train_loop_config={"seconds": job.compute_seconds, "goal": exchanges, "seed": job.seed, "notes": str(folder)},
        policy=spec,
        servers=2,
        apply="streamed" if streamed else "whole",
        scaling_config=ScalingConfig(num_workers=len(job.compute_seconds)),
        run_config=RunConfig(storage_path=str(folder / "runs")),
        fork=True,
        trace=True,
    ).fit()
    events = [from_line(line) for line in (Path(result.path) / "trace.jsonl").read_text().splitlines()]
    assert isinstance(events[0], Began)
    return list(until_goal(events[1:], goal))


def least(spec: str) -> int:
    """Return the fewest workers with which a job accepts the policy."""
    return make(spec).least_workers


def _cases() -> list[Any]:
    marks: dict[str, Any] = {"r2sp": (), "bsp": pytest.mark.slow, "asp": pytest.mark.slow, "ssp": pytest.mark.slow}
    return [
        pytest.param(
            spec,
            streamed,
            id=f"{spec}{' streamed' if streamed else ''}",
            marks=pytest.mark.slow if (spec, streamed) == ("r2sp", True) else marks.get(spec, pytest.mark.matrix),
        )
        for spec, streamed in RUNS
    ]


@pytest.mark.parametrize(("spec", "streamed"), _cases())
def test_the_trace_is_valid_and_the_policy_keeps_its_promise(spec: str, streamed: bool, tmp_path: Path) -> None:
    job = JOBS["mixed"]
    seconds = itertools.islice(itertools.cycle(job.compute_seconds), max(len(job.compute_seconds), least(spec)))
    job = dataclasses.replace(job, compute_seconds=tuple(seconds))
    workers = len(job.compute_seconds)
    judge = judge_of(spec, streamed).watch(on_ray(spec, job, streamed, tmp_path))
    assert judge.arrivals >= job.iterations * workers
    assert judge.version > 0
    assert judge.discarded + judge.applied + len(judge.waiting) <= judge.arrivals
    assert judge.departures == 0
