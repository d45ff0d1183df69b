"""Schemes side by side, fairly: each at a learning rate that all share, and each at its own best of several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean

import msgspec

from paceline.model.correction import Correction
from paceline.reproduce.shared.runs import Run, Runs, Trained
from paceline.simulate.task import Goal


class Scheme(msgspec.Struct, frozen=True):
    """A policy, and how staleness is corrected for."""

    policy: str
    correct: Correction = "none"

    @property
    def name(self) -> str:
        """As one would ask for it."""
        return self.policy if self.correct == "none" else f"{self.policy} --correct {self.correct}"

    def of(self, run: Run, rate: float, seed: int) -> Run:
        return msgspec.structs.replace(run, policy=self.policy, correct=self.correct, rate=rate, seed=seed)


class SchemeResult(msgspec.Struct, frozen=True):
    """One scheme at one learning rate: the mean over the seeds. None: not every seed reached the goal."""

    scheme: Scheme
    rate: float
    rounds: float | None
    samples: float | None
    seconds: float | None
    best: float  # the nearest that any seed came to the goal
    seeds: int
    reached: int  # by how many of them
    iteration_seconds: float
    staleness: float


def measured(trained: Sequence[Trained], scheme: Scheme, goal: Goal) -> SchemeResult:
    """What these runs of one scheme, one for each seed, came to."""
    ends = [(each, each.reaches(goal)) for each in trained]
    reached = [(each, at) for each, at in ends if at is not None]
    whole = len(reached) == len(trained) and bool(reached)
    bests = [each.best(goal.kind) for each in trained]
    return SchemeResult(
        scheme,
        trained[0].run.rate,
        mean(at + 1 for _, at in reached) if whole else None,
        mean(each.learned.samples[at] for each, at in reached) if whole else None,
        mean(each.seconds[at] for each, at in reached) if whole else None,
        max(bests) if goal.kind == "accuracy" else min(bests),
        len(trained),
        len(reached),
        mean(each.iteration_seconds for each in trained),
        mean(each.staleness for each in trained),
    )


def at_rate(
    runs: Runs, like: Run, schemes: Sequence[Scheme], rate: float, seeds: Sequence[int], goal: Goal
) -> list[SchemeResult]:
    """Every scheme at this one rate."""
    wanted = {scheme: [scheme.of(like, rate, seed) for seed in seeds] for scheme in schemes}
    return _measured(runs, wanted, goal)


def at_own_best(
    runs: Runs, like: Run, schemes: Sequence[Scheme], rates: Sequence[float], seeds: Sequence[int], goal: Goal
) -> list[SchemeResult]:
    """Every scheme at whichever rate brings it to the goal in the fewest samples, found with the first seed.

    A scheme that was not run at all of them, because there was no time, has no best: it is left out.
    """
    first = seeds[0]
    found = runs(scheme.of(like, rate, first) for rate in rates for scheme in schemes)
    wanted = {}
    for scheme in schemes:
        tried = [found[run] for rate in rates if (run := scheme.of(like, rate, first)) in found]
        if len(tried) == len(rates):
            best = min(tried, key=lambda trained: _cost(trained, goal))
            wanted[scheme] = [scheme.of(like, best.run.rate, seed) for seed in seeds]
    return _measured(runs, wanted, goal)


def _measured(runs: Runs, wanted: Mapping[Scheme, Sequence[Run]], goal: Goal) -> list[SchemeResult]:
    found = runs(run for each in wanted.values() for run in each)
    complete = {scheme: [found[run] for run in each if run in found] for scheme, each in wanted.items()}
    return [measured(trained, scheme, goal) for scheme, trained in complete.items() if trained]


def _cost(trained: Trained, goal: Goal) -> tuple[float, float]:
    """Samples to the goal; where it was not reached, how far from it the run remained."""
    at = trained.reaches(goal)
    best = trained.best(goal.kind)
    missed = math.inf if math.isnan(best) else -best if goal.kind == "accuracy" else best
    return (math.inf, missed) if at is None else (trained.learned.samples[at], missed)
