"""Advice put to the test: candidates measured in a lab, with the real server and with the real all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.advise.advice import BUCKET, DDP, NEAR, Advice, Candidate, Estimate
from paceline.lab import ddp_run, run
from paceline.lab.namespaces import Lab
from paceline.simulate import ClusterSpec


@dataclass(frozen=True)
class VerifiedEstimate:
    """A candidate, expected and measured."""

    expected: Estimate
    iteration_seconds: float
    samples_per_second: float

    @property
    def off(self) -> float:
        """By how much the measured rate differs from the expected one, relative to it."""
        return self.samples_per_second / self.expected.samples_per_second - 1

    @property
    def worth(self) -> float:
        """Samples a second, by what they bring."""
        return self.samples_per_second / self.expected.price


def contenders(advice: Advice, top: int) -> list[Estimate]:
    """The fastest so many; and what is advised, and what there is now, in any case."""
    return [
        each for number, each in enumerate(advice.ranked) if number < top or each is advice.chosen or each is advice.now
    ]


def measured(lab: Lab, spec: ClusterSpec, expected: Estimate, iterations: int, seed: int = 0) -> VerifiedEstimate:
    """Run a candidate in a lab that has the hosts of this cluster. Workers wait for as long as computing takes."""
    candidate = expected.candidate
    if candidate.policy == DDP:
        overlap = spec.model_bytes > BUCKET  # a smaller model is one bucket, and is sent when all is computed
        report = ddp_run.run(lab, spec, run.LabPlan(DDP, iterations, overlap=overlap, seed=seed)).report
    else:
        described = spec.colocated() if candidate.colocated else spec
        plan = run.LabPlan(candidate.policy, iterations, candidate.streamed, seed=seed)
        report = run.run(lab, described, plan).report
    return VerifiedEstimate(expected, report.mean_iteration_seconds, report.samples_per_second)


def right(verified: Sequence[VerifiedEstimate], chosen: Candidate) -> bool:
    """Is what was advised the one of those measured that learns fastest, or about as fast?"""
    best = max(each.worth for each in verified)
    return any(each.worth >= best / (1 + NEAR) for each in verified if each.expected.candidate == chosen)
