"""Verifies advice: measures candidates in a lab, with the real server and the real all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.advise.candidates import DDP, Candidate
from paceline.advise.evaluate import BUCKET, Estimate
from paceline.advise.explain import NEAR, Advice
from paceline.lab import ddp_run, run
from paceline.lab.namespaces import Lab
from paceline.lab.plan import LabPlan
from paceline.simulate import ClusterSpec


@dataclass(frozen=True)
class VerifiedEstimate:
    """An estimate, and the speed that was measured for its candidate."""

    expected: Estimate
    iteration_seconds: float
    samples_per_second: float

    @property
    def error(self) -> float:
        """The relative difference of the measured from the expected samples per second."""
        return self.samples_per_second / self.expected.samples_per_second - 1

    @property
    def effective_rate(self) -> float:
        """Measured samples per second, divided by the price of the staleness."""
        return self.samples_per_second / self.expected.price


def contenders(advice: Advice, top: int) -> list[Estimate]:
    """Return the `top` fastest candidates, the advised one, and the present set-up."""
    return [
        each for number, each in enumerate(advice.ranked) if number < top or each is advice.chosen or each is advice.now
    ]


def measure(lab: Lab, spec: ClusterSpec, expected: Estimate, iterations: int, seed: int = 0) -> VerifiedEstimate:
    """Measure a candidate in a lab that has the hosts of this cluster. Workers wait instead of computing."""
    candidate = expected.candidate
    if candidate.policy == DDP:
        overlap = spec.model_bytes > BUCKET  # a smaller model is one bucket, sent after the backward pass
        report = ddp_run.run(lab, spec, LabPlan(DDP, iterations, overlap=overlap, seed=seed)).report
    else:
        described = spec.colocated() if candidate.colocated else spec
        plan = LabPlan(candidate.policy, iterations, candidate.streamed, seed=seed)
        report = run.run(lab, described, plan).report
    return VerifiedEstimate(expected, report.mean_iteration_seconds, report.samples_per_second)


def is_right(verified: Sequence[VerifiedEstimate], chosen: Candidate) -> bool:
    """Return whether the chosen candidate learns fastest of those measured, or about as fast."""
    best = max(each.effective_rate for each in verified)
    return any(each.effective_rate >= best / (1 + NEAR) for each in verified if each.expected.candidate == chosen)
