"""Estimates of candidates: all-reduce by hand, and the price of staleness."""

from __future__ import annotations

import pytest

from advise.clusters import cluster
from paceline.advise.candidates import DDP, Candidate
from paceline.advise.evaluate import estimate, staleness_price
from paceline.model.optimizer_spec import OptimizerSpec


def test_the_time_of_an_all_reduce_is_as_calculated_by_hand() -> None:
    small = estimate(cluster(0.12, workers=8), Candidate(DDP), 10)
    assert small.iteration_seconds == pytest.approx(0.12 + 2 * 7 / 8 * 0.1, rel=0.01)
    slowest = estimate(cluster(0.12, workers=8, slow=2.0), Candidate(DDP), 10)
    assert slowest.iteration_seconds == pytest.approx(0.24 + 0.175, rel=0.01)
    # Of 100 buckets, all but the first are sent during the rest of the backward pass, or after it.
    large = estimate(cluster(30.0, model=100 * 25 * 2**20, workers=2), Candidate(DDP), 10)
    assert large.iteration_seconds == pytest.approx(10.0 + 0.2 + 2621.44 / 50, rel=0.01)


def test_the_price_of_staleness_depends_on_the_optimizer() -> None:
    plain, momentum = (OptimizerSpec("SGD", ({"lr": 0.1, "momentum": beta},)) for beta in (0.0, 0.9))
    adam, other = (OptimizerSpec(name, ({"lr": 0.1},)) for name in ("Adam", "RMSprop"))
    for optimizer in (None, plain, momentum, adam, other):
        assert staleness_price("bsp", 0.0, optimizer) == 1
        assert staleness_price("asp", 15.0, optimizer) > staleness_price("r2sp", 15.0, optimizer) > 1
    assert staleness_price("asp", 15.0, momentum) == staleness_price("ssp:staleness=5", 3.0, adam)
    assert staleness_price("asp", 15.0, momentum) > staleness_price("asp", 15.0, plain)
    assert staleness_price("r2sp:groups=3", 2.0, adam) < staleness_price("r2sp", 15.0, adam)
    unequal = cluster(0.1, slow=3.0)
    cheap, dear = (estimate(unequal, Candidate("asp"), 40, optimizer=each) for each in (plain, momentum))
    assert cheap.samples_per_second == dear.samples_per_second
    assert cheap.effective_rate > 1.5 * dear.effective_rate
