"""Advice put to the test: candidates measured in a lab, with the real server and with the real all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection

from paceline.launch import rival, trial
from paceline.launch.advice import BUCKET, DDP, NEAR, Advice, Candidate, Expected
from paceline.launch.lab import Lab, LabError
from paceline.simulate import ClusterSpec

STORE = 29500  # the port where ranks meet
PATIENCE = 120.0  # seconds


@dataclass(frozen=True)
class Verified:
    """A candidate, expected and measured."""

    expected: Expected
    iteration_seconds: float
    samples_per_second: float

    @property
    def off(self) -> float:
        """By how much the measured rate differs from the expected one, relative to it."""
        return self.samples_per_second / self.expected.samples_per_second - 1


def contenders(advice: Advice, top: int) -> list[Expected]:
    """The fastest so many; and what is advised, and what there is now, in any case."""
    return [
        each for number, each in enumerate(advice.ranked) if number < top or each is advice.chosen or each is advice.now
    ]


def measured(lab: Lab, spec: ClusterSpec, expected: Expected, iterations: int, seed: int = 0) -> Verified:
    """Run a candidate in a lab that has the hosts of this cluster. Workers wait for as long as computing takes."""
    candidate = expected.candidate
    if candidate.policy == DDP:
        seconds = _all_reduce(lab, spec, iterations, seed)
        return Verified(expected, seconds, sum(worker.batch for worker in spec.workers) / seconds)
    described = spec.colocated() if candidate.colocated else spec
    plan = trial.Plan(candidate.policy, iterations, candidate.streamed, seed=seed)
    report = trial.run(lab, described, plan).report
    return Verified(expected, report.mean_iteration_seconds, report.samples_per_second)


def right(verified: Sequence[Verified], chosen: Candidate) -> bool:
    """Is what was advised the fastest of those that were measured, or about as fast?"""
    best = max(each.samples_per_second for each in verified)
    return any(each.samples_per_second >= best / (1 + NEAR) for each in verified if each.expected.candidate == chosen)


def _all_reduce(lab: Lab, spec: ClusterSpec, iterations: int, seed: int) -> float:
    """Seconds of an iteration, of the first rank that tells: they keep step, and how they part is no matter."""
    store = lab.address(trial.worker_host(0)), STORE
    overlap, count = spec.model_bytes > BUCKET, len(spec.workers)
    pipes, processes = [], []
    for number, worker in enumerate(spec.workers):
        rank = rival.Rank(number, count, store, worker, worker.batch, spec.model_bytes, iterations, overlap, seed)
        ours, theirs = lab.pipe()
        processes.append(lab.start(trial.worker_host(number), _tell, theirs, rank))
        theirs.close()
        pipes.append(ours)
    try:
        told = connection.wait(pipes, PATIENCE)
        if not told:
            raise LabError(f"All-reduce between the hosts did not end within {PATIENCE:g} s; the links are too slow.")
        return float(next(pipe for pipe in pipes if pipe in told).recv())
    except EOFError:
        raise LabError("All-reduce between the hosts failed; is torch built with gloo?") from None
    finally:
        lab.stop(processes)


def _tell(pipe: connection.Connection, rank: rival.Rank) -> None:
    pipe.send(rival.train(rank)[0])
