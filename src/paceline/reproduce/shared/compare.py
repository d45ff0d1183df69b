"""Compares schemes fairly: all at one shared learning rate, and each at its own best of several rates."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from statistics import mean

import msgspec

from paceline.model.combination import LINEAR
from paceline.model.correction import Correction
from paceline.reproduce.shared.runs import Run, Runs, Trained
from paceline.simulate.task import Goal


class Scheme(msgspec.Struct, frozen=True):
    """A policy and its staleness correction."""

    policy: str
    correct: Correction = "none"

    @property
    def name(self) -> str:
        """The policy and the correction, as written on the command line."""
        return self.policy if self.correct == "none" else f"{self.policy} --correct {self.correct}"

    def of(self, run: Run, rate: float, seed: int) -> Run:
        """Return a copy of the run with this scheme, learning rate and seed.

        For SGD the rate is that of an update. For an adaptive optimizer it is that of a step, however many updates the
        scheme applies together, because such a step is as long as its rate.
        """
        if run.optimizer not in LINEAR:
            rate /= self.updates_in_a_step(len(run.spec().workers))
        return msgspec.structs.replace(run, policy=self.policy, correct=self.correct, rate=rate, seed=seed)

    def updates_in_a_step(self, workers: int) -> float:
        """Return how many updates this scheme applies together, in the mean."""
        if self.policy.partition(":")[0] == "bsp":
            return workers
        groups = re.search(r"\bgroups=(\d+)", self.policy)
        return workers / int(groups[1]) if groups else 1.0


class SchemeResult(msgspec.Struct, frozen=True):
    """The result of one scheme at one learning rate: means over the seeds, or None if any seed missed the goal."""

    scheme: Scheme
    rate: float
    rounds: float | None
    samples: float | None
    seconds: float | None
    best: float  # the best accuracy or loss of any seed
    seeds: int
    reached: int  # seeds that reached the goal
    iteration_seconds: float
    staleness: float


def measured(trained: Sequence[Trained], scheme: Scheme, goal: Goal) -> SchemeResult:
    """Return the result of one scheme from its runs, one per seed."""
    ends = [(each, each.reaches(goal)) for each in trained]
    reached = [(each, at) for each, at in ends if at is not None]
    all_reached = len(reached) == len(trained) and bool(reached)
    bests = [each.best(goal.kind) for each in trained]
    return SchemeResult(
        scheme,
        trained[0].run.rate,
        mean(at + 1 for _, at in reached) if all_reached else None,
        mean(each.learned.samples[at] for each, at in reached) if all_reached else None,
        mean(each.seconds[at] for each, at in reached) if all_reached else None,
        max(bests) if goal.kind == "accuracy" else min(bests),
        len(trained),
        len(reached),
        mean(each.iteration_seconds for each in trained),
        mean(each.staleness for each in trained),
    )


def at_rate(
    runs: Runs, template: Run, schemes: Sequence[Scheme], rate: float, seeds: Sequence[int], goal: Goal
) -> list[SchemeResult]:
    """Return the result of every scheme at one learning rate."""
    wanted = {scheme: [scheme.of(template, rate, seed) for seed in seeds] for scheme in schemes}
    return _measured(runs, wanted, goal)


def at_own_best(
    runs: Runs, template: Run, schemes: Sequence[Scheme], rates: Sequence[float], seeds: Sequence[int], goal: Goal
) -> list[SchemeResult]:
    """Return the result of every scheme at the rate at which it needs the fewest samples to reach the goal.

    The rate is chosen with the first seed. A scheme that was not trained at all rates, because time ran out, has no
    best rate and is left out.
    """
    first = seeds[0]
    found = runs(scheme.of(template, rate, first) for rate in rates for scheme in schemes)
    wanted = {}
    for scheme in schemes:
        tried = {rate: found[run] for rate in rates if (run := scheme.of(template, rate, first)) in found}
        if len(tried) == len(rates):
            best = min(rates, key=lambda rate: _cost(tried[rate], goal))
            wanted[scheme] = [scheme.of(template, best, seed) for seed in seeds]
    return _measured(runs, wanted, goal)


def _measured(runs: Runs, wanted: Mapping[Scheme, Sequence[Run]], goal: Goal) -> list[SchemeResult]:
    found = runs(run for each in wanted.values() for run in each)
    complete = {scheme: [found[run] for run in each if run in found] for scheme, each in wanted.items()}
    return [measured(trained, scheme, goal) for scheme, trained in complete.items() if trained]


def _cost(trained: Trained, goal: Goal) -> tuple[float, float]:
    """Return a sort key: samples to the goal, then the best value, which ranks runs that missed the goal."""
    at = trained.reaches(goal)
    best = trained.best(goal.kind)
    missed = math.inf if math.isnan(best) else -best if goal.kind == "accuracy" else best
    return (math.inf, missed) if at is None else (trained.learned.samples[at], missed)
