"""A worker's own batch size is the number of samples that it requests. The rest of an epoch may be smaller."""

from __future__ import annotations

import pytest

from job.conversation import Conversation, only
from paceline.job import events, instructions
from paceline.job.samples import Samples
from paceline.policies import make

OWN, LEFT = 128, 7
SIZE = OWN + LEFT


def begun(policy: str) -> Conversation:
    """Begin a job whose second worker gets the rest of the first epoch."""
    talk = Conversation(policy, workers=2)
    talk.begin(2)
    for worker, got in ((0, OWN), (1, LEFT)):
        (samples,) = only(instructions.SendSamples, talk.request(worker, 1, OWN, SIZE, epochs=1000))
        assert samples.stop - samples.start == got
    return talk


@pytest.mark.parametrize("policy", ["r2sp", "bsp", "groups:count=1,inner=bsp:tune_batches=true", "filtered:policy=bsp"])
def test_the_rest_of_an_epoch_counts_for_its_share_of_a_batch(policy: str) -> None:
    spec = policy if ":" in policy else f"{policy}:tune_batches=true"
    if policy.startswith("filtered"):
        spec = "filtered:policy=bsp:tune_batches=true"
    talk = begun(spec)
    out = talk.ready(0, 1, 1, batch=OWN) + talk.arrive(0, 1) + talk.ready(1, 1, 1, batch=LEFT) + talk.arrive(1, 1)
    weights = {
        update.worker: weight
        for order in only(instructions.OrderApply, out)
        for update, weight in zip(order.decision.updates, order.decision.weights, strict=True)
    }
    assert weights == pytest.approx({0: 1.0, 1: LEFT / OWN})


def test_the_rest_of_an_epoch_counts_for_its_share_where_updates_are_streamed() -> None:
    talk = Conversation("r2sp:tune_batches=true", streams=True)
    talk.begin(1)
    talk.request(0, 1, OWN, LEFT, epochs=1000)
    (stream,) = only(instructions.OrderStream, talk.tell(events.GradientBegun(talk.connections[0], 1, 0, LEFT, (1,))))
    assert stream.weights == pytest.approx((LEFT / OWN,))


@pytest.mark.parametrize("policy", ["r2sp:tune_batches=true", "bsp:tune_batches=true"])
def test_equal_workers_keep_equal_batches_whatever_is_left_when_they_join(policy: str) -> None:
    """Without their own batch sizes, the second one would stay at 7 to 28 samples of four times the weight."""
    talk = begun(policy)
    taken = {0: OWN, 1: LEFT}
    granted: dict[int, list[int | None]] = {0: [], 1: []}
    for iteration in range(1, 40):
        out = []
        for worker in (0, 1):
            talk.now += 1.0
            out += talk.ready(worker, iteration, iteration, version=talk.state.version, batch=taken[worker])
            out += talk.arrive(worker, iteration)
        for grant in only(instructions.SendGrant, out):
            worker = next(each for each, connection in talk.connections.items() if connection == grant.to)
            if grant.iteration == 1:  # workers of a ring begin one after the other
                continue
            granted[worker].append(grant.batch_size)
            wanted = grant.batch_size or OWN
            (samples,) = only(instructions.SendSamples, talk.request(worker, iteration + 1, wanted, SIZE, epochs=1000))
            taken[worker] = samples.stop - samples.start
    assert set(granted[0]) == set(granted[1]) == {OWN}


def test_a_worker_is_asked_once_and_only_for_a_grant_without_a_batch() -> None:
    policy = make("r2sp:tune_batches=true")
    told: list[tuple[object, float]] = []
    policy.measured = lambda kind, subject, value, now: told.append((subject, value)) or []  # type: ignore[method-assign,func-returns-value]
    talk = Conversation(policy, workers=1)
    talk.begin(1)
    for iteration, count in ((1, 5), (2, 60), (3, 70)):
        talk.request(0, iteration, count, 1000, epochs=10)
        talk.ready(0, iteration, iteration, batch=count, version=talk.state.version)
        talk.arrive(0, iteration)
    assert told == [(0, 5.0)]


def test_samples_know_what_was_asked_for_until_they_are_used() -> None:
    samples = Samples(10, 1)
    samples.take(0, 1, 8)
    samples.take(1, 1, 8)
    assert samples.given(1) == 2
    assert samples.asked(1, (1, 1)) == 8
    assert samples.asked(1, (2,)) == 0
    samples.arrived(1, (1, 1), "update")
    assert samples.asked(1, (1,)) == 0
    samples.abandoned(0)
    assert samples.asked(0, (1,)) == 0


def warned(talk: Conversation) -> list[str]:
    return [each.text for each in talk.unfiltered if isinstance(each, instructions.LogLine) and each.warns]


def talked(policy: str, batches: list[int]) -> list[str]:
    """Return the warnings of a job whose two workers are unequal, and compute these batches whatever is granted."""
    talk = Conversation(policy, workers=2)
    talk.begin(2)
    found: list[str] = []
    for iteration, batch in enumerate(batches, 1):
        for worker in (0, 1):
            talk.now += 1.0
            talk.ready(worker, iteration, version=talk.state.version, batch=batch, seconds=(0.1, 1.0)[worker])
            found += warned(talk)
            talk.arrive(worker, iteration)
            found += warned(talk)
    return found


def test_a_worker_that_does_not_follow_the_tuned_batches_is_named_once() -> None:
    """A Trainer or a stream has batches of its own. Tuning had no effect there, and nobody was told."""
    (only_one,) = talked("bsp:tune_batches=true", [32] * 40)
    assert "worker 0 does not follow" in only_one
    assert "computed 32" in only_one and "optimizer.granted_batch" in only_one


def test_without_tuning_no_worker_is_named() -> None:
    assert not talked("bsp", [32] * 40)


def test_a_discarded_gradient_has_no_weight() -> None:
    """Without shards the worker applies its gradient itself, so it must learn that this one does not count."""
    talk = Conversation("bsp:backup=1,weights=sum", workers=3, shards=0)
    talk.begin(3)
    out = [grant for worker in (0, 1, 2) for grant in only(instructions.SendGrant, talk.ready(worker, 1, batch=4))]
    weights = {grant.to: grant.weight for grant in out}
    assert weights == {talk.connections[0]: 1.0, talk.connections[1]: 1.0, talk.connections[2]: 0.0}
