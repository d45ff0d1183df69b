"""A coordinator without shards: workers proceed in the policy's order, and exchange gradients by other means."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import paceline
from paceline.observe.trace import Applied
from train.jobs import job


def pacing(steps: int) -> Callable[[str], list[int]]:
    """Return a worker that proceeds this many times, and returns the iterations."""

    def run(where: str) -> list[int]:
        with paceline.coordinate(connect=where) as pace:
            return [pace.proceed(batch_size=8, loss=1.0).iteration for _ in range(steps)]

    return run


def test_workers_proceed_in_the_order_of_the_ring() -> None:
    with job("r2sp:patience=10000", shards=0, workers=3) as running:
        iterations = running.work(*[pacing(10)] * 3)
        running.finish()
    assert iterations == [list(range(2, 12))] * 3
    order = [event.workers[0] for event in running.events if isinstance(event, Applied)]
    assert len(order) == 30
    started = 3
    steady = order[started : started + 24]
    assert steady == [steady[i % 3] for i in range(24)], "the same order, round after round"
    assert max(max(event.staleness) for event in running.events if isinstance(event, Applied)) <= 2


def test_a_barrier_works_without_shards() -> None:
    with job("bsp", shards=0, workers=2) as running:
        running.work(*[pacing(5)] * 2)
        running.finish()
    assert [sorted(event.workers) for event in running.events if isinstance(event, Applied)] == [[0, 1]] * 5


def test_without_a_server_every_request_is_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_CONNECT", raising=False)
    with paceline.coordinate() as pace:
        assert pace.worker == 0
        assert [pace.proceed(batch_size=4).iteration for _ in range(3)] == [2, 3, 4]
        assert pace.proceed(batch_size=4).weight == 1.0


def following(batches: list[int]) -> Callable[[str], list[float]]:
    """Return a worker that computes these batches, and returns the weights of its gradients."""

    def run(where: str) -> list[float]:
        with paceline.coordinate(connect=where) as pace:
            return [pace.proceed(batch_size=batch, seconds=0.001).weight for batch in batches]

    return run


def test_a_permission_names_the_weight_of_the_gradient() -> None:
    """The paper's worker applies the factor of the learning rate itself (algorithm 1, line 5)."""
    with job("bsp:weights=mean", shards=0, workers=2) as running:
        small, large = running.work(following([8] * 4), following([24] * 4))
        running.finish()
    assert small == pytest.approx([0.25] * 4)
    assert large == pytest.approx([0.75] * 4)


def test_a_tuned_batch_has_a_larger_weight() -> None:
    with job("r2sp:weights=sum,tune_batches=true", shards=0, workers=1) as running:
        (weights,) = running.work(following([8, 8, 16, 4]))
        running.finish()
    assert weights[0] == 1.0
    assert weights[3] == pytest.approx(0.5)
