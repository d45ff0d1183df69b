"""Clipping: no worker can change the model by much more than the others, and usual updates are left alone."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from job.conversation import Conversation, only
from paceline.job import events, instructions, snapshot
from paceline.job.clipping import NOT_CLIPPED, REMEMBERED, Clipping, Size
from paceline.observe.observer import Recorder
from paceline.observe.trace import Clipped

NORMS = st.floats(0.5, 2.0)


def factor(clipping: Clipping, worker: int, norm: float, statistics: float = 0.0) -> float:
    """Return the factor of an update of these norms, at the usual learning rate."""
    factors = clipping.factors(worker, Size(norm, statistics, 0.1))
    assert factors.rate == 1
    return factors.weight


def push(
    talk: Conversation, worker: int, iteration: int, norm: float, rate: float = 0.1
) -> list[instructions.OrderApply]:
    """Have a worker push an update of this norm, in equal parts to all shards. Return the orders to apply updates."""
    out = talk.ready(worker, iteration)
    part = norm**2 / len(talk.shards)
    for shard in talk.shards:
        incarnation = talk.incarnations[worker]
        out += talk.tell(events.UpdateArrived(shard, worker, incarnation, iteration, (part, 0.0, rate)))
    return only(instructions.OrderApply, out)


def warnings(talk: Conversation) -> list[str]:
    """Return the warnings that answered the last event."""
    return [each.text for each in talk.unfiltered if isinstance(each, instructions.LogLine) and each.warns]


@given(
    honest=st.lists(st.lists(NORMS, min_size=1, max_size=12), min_size=3, max_size=6),
    attack=st.lists(st.floats(0.0, 1e30), min_size=1, max_size=40),
    max_norm=st.floats(1.0, 100.0),
)
def test_less_than_half_of_the_workers_cannot_change_the_model_by_more_than_the_limit(
    honest: list[list[float]], attack: list[float], max_norm: float
) -> None:
    """The norms of honest workers lie between 0.5 and 2."""
    clipping = Clipping(max_norm)
    for worker, norms in enumerate(honest):
        for norm in norms:
            assert factor(clipping, worker, norm) * norm >= min(norm, 0.5 * max_norm) * (1 - 1e-9)
    liars = range(100, 100 + (len(honest) - 1) // 2)
    for norm in attack:
        for liar in liars:
            assert factor(clipping, liar, norm) * norm <= 2 * max_norm * (1 + 1e-9)
            assert 0.5 <= clipping.usual().gradients <= 2


def test_a_worker_that_pushes_often_counts_once() -> None:
    clipping = Clipping(10)
    for worker in range(3):
        factor(clipping, worker, 1)
    for _ in range(100):
        assert factor(clipping, 3, 1000) == pytest.approx(0.01)


def test_of_two_workers_the_smaller_counts() -> None:
    clipping = Clipping(10)
    assert factor(clipping, 0, 1000) == 1  # the first update of a job is compared with nothing
    assert factor(clipping, 1, 1) == 1
    assert factor(clipping, 0, 1000) == pytest.approx(0.01)


def test_a_worker_alone_is_compared_with_its_own_last_updates() -> None:
    clipping = Clipping(10)
    for _ in range(REMEMBERED):
        assert factor(clipping, 0, 1) == 1
    assert factor(clipping, 0, 100) == pytest.approx(0.1)
    for _ in range(REMEMBERED):  # if the gradients stay large, they become usual
        last = factor(clipping, 0, 100)
    assert last == 1


def test_statistics_are_compared_with_statistics() -> None:
    clipping = Clipping(10)
    for worker in range(3):
        assert factor(clipping, worker, 0.001, 500) == 1
    assert factor(clipping, 0, 1, 500) == pytest.approx(0.01)
    assert factor(clipping, 1, 0.001, 500_000) == pytest.approx(0.01)
    assert factor(clipping, 2, 1, 500_000) == pytest.approx(0.01)


def test_nothing_is_compared_with_a_usual_norm_of_zero() -> None:
    clipping = Clipping(10)
    for worker in range(3):
        factor(clipping, worker, 0)
    assert factor(clipping, 0, 5) == 1


def test_a_worker_that_has_left_no_longer_counts() -> None:
    clipping = Clipping(10)
    for worker in range(3):
        factor(clipping, worker, 1)
    for worker in (3, 4):
        factor(clipping, worker, 100)
    for worker in range(3):
        clipping.forget(worker)
    assert factor(clipping, 5, 900) == 1


def test_a_worker_that_is_left_alone_is_compared_with_what_was_usual() -> None:
    clipping = Clipping(10)
    for worker in range(3):
        factor(clipping, worker, 1)
    for worker in range(2):
        clipping.forget(worker)
    for _ in range(3 * REMEMBERED):
        assert factor(clipping, 2, 1000) == pytest.approx(0.01)


def test_a_restored_job_knows_the_usual_norms() -> None:
    before, after = Clipping(10), Clipping(10)
    assert before.as_json() == []
    for worker in range(3):
        factor(before, worker, 1, 2)
    after.recall(json.loads(json.dumps(before.as_json())))
    assert after.as_json() == [1, 2, 0.1]
    assert factor(after, 0, 1000, 2) == pytest.approx(0.01)


@pytest.mark.parametrize("shards", [1, 3])
def test_the_gradient_of_a_large_update_is_clipped(shards: int) -> None:
    talk = Conversation("asp", workers=3, shards=shards, max_norm=10.0)
    talk.begin(3)
    for worker in (0, 1, 2):
        assert push(talk, worker, 1, 1.0)[0].clips == ()
    (order,) = push(talk, 2, 2, 1e6)
    assert order.clips[0] == pytest.approx((1e-5, 1))
    assert order.decision.weights == (1.0,)  # the learning rate stays: only the gradient is too large
    assert "worker 2 sent an update 1e+06 times as large as usual" in warnings(talk)[0]
    assert push(talk, 2, 3, 40.0)[0].clips[0] == pytest.approx((0.25, 1))
    assert not warnings(talk)  # once for each worker
    assert push(talk, 0, 2, 2.0)[0].clips == ()
    clipped = [(each.worker, each.iteration) for each in talk.trace if isinstance(each, Clipped)]
    assert clipped == [(2, 2), (2, 3)]


def test_a_learning_rate_is_scaled_down_apart_from_the_gradients() -> None:
    """Adam divides by the size of the gradients, so a smaller weight would not make up for a larger rate."""
    talk = Conversation("asp", workers=3, max_norm=10.0)
    talk.begin(3)
    for worker in (0, 1, 2):
        assert push(talk, worker, 1, 1.0)[0].clips == ()
    (order,) = push(talk, 2, 2, 1.0, rate=100.0)
    assert order.clips[0] == pytest.approx((1, 0.01))
    assert "worker 2 sent a learning rate 1e+03 times as large as usual" in warnings(talk)[0]
    (order,) = push(talk, 0, 2, 1.0)
    assert order.clips == ()


def test_only_the_large_update_of_a_round_is_clipped() -> None:
    talk = Conversation("bsp:weights=mean", workers=3, shards=2, max_norm=10.0)
    talk.begin(3)
    for iteration, norm, factor in ((1, 1.0, 1.0), (2, 1e3, 0.01)):
        push(talk, 0, iteration, 1.0)
        push(talk, 1, iteration, norm)
        (order,) = push(talk, 2, iteration, 1.0)
        assert order.decision.weights == pytest.approx((1 / 3,) * 3)
        clips = order.clips or (NOT_CLIPPED,) * 3
        factors = dict(zip((each.worker for each in order.decision.updates), clips, strict=True))
        assert {worker: each.weight for worker, each in factors.items()} == pytest.approx({0: 1, 1: factor, 2: 1})


def test_a_running_sum_contains_the_factor_of_a_clipped_update() -> None:
    talk = Conversation("bsp:running=true", workers=3, max_norm=10.0)
    talk.begin(3)
    for iteration, norm, factor in ((1, 1.0, 1.0), (2, 1e3, 0.01)):
        out = []
        for worker, its in ((0, 1.0), (1, norm), (2, 1.0)):
            talk.ready(worker, iteration)
            out += talk.tell(events.UpdateArrived(0, worker, 1, iteration, (its**2, 0.0, 0.1)))
        added = [each.weight for each in only(instructions.OrderAdd, out)]
        clips = [each.clip.weight for each in only(instructions.OrderAdd, out)]
        (order,) = only(instructions.OrderApply, out)
        ((_, whole),) = order.decision.sums
        assert clips == pytest.approx([1, factor, 1])
        assert [weight * whole for weight in added] == pytest.approx(list(order.decision.weights))


def test_a_part_that_is_reported_twice_counts_once() -> None:
    talk = Conversation("asp", workers=2, shards=2, max_norm=10.0)
    talk.begin(2)
    push(talk, 0, 1, 1.0)
    talk.ready(1, 1)
    for shard in (0, 0, 0, 1):
        talk.tell(events.UpdateArrived(shard, 1, 1, 1, (49.9, 0.0, 0.1)))
    assert not [each for each in talk.trace if isinstance(each, Clipped)]  # its norm is 10, which is the limit


def test_a_saved_job_continues_to_clip() -> None:
    talk = Conversation("asp", workers=3, max_norm=10.0)
    talk.begin(3)
    for worker in range(3):
        push(talk, worker, 1, 1.0)
    talk.state = snapshot.load(json.loads(json.dumps(snapshot.save(talk.state))), Recorder(talk.trace.append))
    assert push(talk, 0, 2, 100.0)[0].clips[0].weight == pytest.approx(0.1)


def test_a_job_that_begins_with_a_checkpoint_knows_the_usual_size() -> None:
    before = Conversation("asp", workers=3, max_norm=10.0)
    before.begin(3)
    for worker in range(3):
        push(before, worker, 1, 1.0)
    saved = json.loads(json.dumps(before.state.snapshot()))
    after = Conversation("asp", workers=1, restored=saved, max_norm=10.0)
    after.tell(events.ShardLoaded(0))
    after.join(0)
    assert push(after, 0, 1, 1000.0)[0].clips[0].weight == pytest.approx(0.01)
