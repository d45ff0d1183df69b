"""The job checks the numbers that workers claim, before a policy sees them. It refuses impossible ones."""

from __future__ import annotations

import math
from typing import Any

import pytest

from job.conversation import Conversation, only
from paceline.job import events, instructions
from paceline.job.limits import MAX_SAMPLES, MAX_SECONDS, MIN_SECONDS, metric_of
from paceline.policies.asp import ASP
from paceline.policies.contract import DRIVER_KINDS, Decisions, Update


class Listener(ASP):
    """A policy that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.updates: list[Update] = []
        self.metrics: list[tuple[str, float]] = []

    def arrived(self, update: Update, now: float) -> Decisions:
        self.updates.append(update)
        return super().arrived(update, now)

    def measured(self, kind: str, subject: object, value: float, now: float) -> Decisions:
        self.metrics.append((kind, value))
        return []


def begun(workers: int = 1) -> tuple[Conversation, Listener]:
    policy = Listener()
    talk = Conversation(policy, workers=workers)
    talk.begin(workers)
    return talk, policy


def push(talk: Conversation, worker: int, iteration: int, **claims: Any) -> list[Any]:
    ready = {"batch_size": 2, "compute_seconds": 0.1, "loss": None, "taken": ()} | claims
    connection = talk.connections[worker]
    return talk.tell(events.GradientComputed(connection, iteration, 0, **ready)) + talk.arrive(worker, iteration)


def test_an_update_counts_for_no_more_samples_than_the_worker_was_given() -> None:
    talk, policy = begun()
    talk.request(0, 1, count=2)
    talk.request(0, 2, count=3)
    push(talk, 0, 1, batch_size=MAX_SAMPLES, taken=(1,))
    push(talk, 0, 2, batch_size=MAX_SAMPLES, taken=(2, 2, 2))
    assert [update.batch_size for update in policy.updates] == [2, 3]


def test_an_update_may_count_for_fewer_samples_than_the_worker_was_given() -> None:
    talk, policy = begun()
    talk.request(0, 1, count=4)
    push(talk, 0, 1, batch_size=3, taken=(1,))
    assert policy.updates[0].batch_size == 3


def test_samples_of_another_worker_do_not_count() -> None:
    talk, policy = begun(2)
    talk.request(0, 1, count=4)
    push(talk, 1, 1, batch_size=MAX_SAMPLES, taken=(1,))
    assert policy.updates[0].batch_size == 1


def test_a_worker_that_names_no_samples_counts_for_no_more_than_those_that_do() -> None:
    talk, policy = begun(2)
    talk.request(0, 1, count=4)
    push(talk, 1, 1, batch_size=1000)
    push(talk, 0, 1, batch_size=4, taken=(1,))
    push(talk, 1, 2, batch_size=1000)
    assert [update.batch_size for update in policy.updates] == [1, 4, 4]


def test_where_the_job_serves_no_samples_a_granted_batch_limits_the_claim() -> None:
    talk = Conversation("r2sp:tune_batches=true", workers=1)
    talk.begin(1)
    for iteration in range(1, 4):
        push(talk, 0, iteration, batch_size=8)
    push(talk, 0, 4, batch_size=MAX_SAMPLES)
    arrived = [event for event in talk.trace if type(event).__name__ == "Arrived"]
    assert [event.batch_size for event in arrived] == [8, 8, 8, 8]


def test_an_announced_gradient_counts_for_no_more_samples_than_the_worker_holds() -> None:
    talk = Conversation("asp:weights=mean", workers=2, streams=True)
    talk.begin(2)
    streamed = []
    for worker, claim in ((0, 2), (1, MAX_SAMPLES)):
        talk.request(worker, 1, count=2)
        out = talk.tell(events.GradientBegun(talk.connections[worker], 1, 0, claim))
        streamed += only(instructions.OrderStream, out)
    assert [order.weights for order in streamed][-1] == (0.5,)


@pytest.mark.parametrize("claimed", [5e-324, 1e-300, 1e-9])
def test_no_computation_takes_less_than_a_microsecond(claimed: float) -> None:
    talk, policy = begun()
    push(talk, 0, 1, compute_seconds=claimed)
    push(talk, 0, 2, compute_seconds=0.0)
    assert [update.compute_seconds for update in policy.updates] == [MIN_SECONDS, 0.0]


@pytest.mark.parametrize("claimed", [1.1 * MAX_SECONDS, 1e300, math.inf, math.nan, -1e-9])
def test_a_computation_that_takes_impossibly_long_is_refused(claimed: float) -> None:
    talk, policy = begun()
    (refused,) = only(instructions.SendRefused, push(talk, 0, 1, compute_seconds=claimed))
    assert "A gradient takes 0 to 10000000 s" in refused.reason
    assert not policy.updates


@pytest.mark.parametrize("claimed", [math.nan, math.inf, -math.inf, 1e300, -1e300])
def test_a_loss_that_is_not_a_usable_number_is_left_out(claimed: float) -> None:
    talk, policy = begun()
    push(talk, 0, 1, loss=claimed)
    push(talk, 0, 2, loss=-2.5)
    assert [update.loss for update in policy.updates] == [None, -2.5]


@pytest.mark.parametrize("kind", sorted(DRIVER_KINDS))
def test_a_worker_cannot_report_a_value_that_only_the_job_tells_a_policy(kind: str) -> None:
    """It appears in the trace, like every metric of a script."""
    talk, policy = begun()
    for name in (kind, "val_loss"):
        talk.tell(events.MetricReported(talk.connections[0], name, 0.5))
    assert policy.metrics == [("val_loss", 0.5)]
    assert [event.kind for event in talk.trace if type(event).__name__ == "Measured"] == [kind, "val_loss"]


def test_a_metric_is_limited_unless_it_is_infinite() -> None:
    assert [metric_of(value) for value in (1e300, -1e300, 3.0, math.inf)] == [1e30, -1e30, 3.0, math.inf]
    assert math.isnan(metric_of(math.nan))


def test_the_shortest_time_does_not_break_the_tuning_of_batches() -> None:
    """A batch divided by a time of 5e-324 s is infinite, and the next batch size was NaN."""
    talk = Conversation("r2sp:tune_batches=true", workers=2)
    talk.begin(2)
    for iteration in range(1, 30):
        for worker in (0, 1):
            talk.now += 0.1 * (1 + worker)
            push(talk, worker, iteration, batch_size=8, compute_seconds=5e-324 if worker else 0.1)
            talk.tell(events.TimerFired())
    assert talk.state.version >= 30
