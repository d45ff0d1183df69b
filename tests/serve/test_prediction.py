"""Predicted weights on real shards: what a pull is answered with, and that no answer mixes two versions.

All gradients are random. What a shard sends is compared, bit for bit, with a slice that the test updates itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from paceline.job.saving import MAX_STALENESS
from paceline.model.correction import CORRECTIONS, Correction
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.model.slice import Slice
from paceline.serve.shard.prediction import Predictor
from paceline.serve.shard.pulls import PullServer
from paceline.serve.shard.store import WholeStore
from paceline.serve.shard.whole_updates import WholeUpdates
from paceline.serve.wire.messages import (
    ApplyUpdates,
    Identity,
    Pull,
    Push,
    PushReceived,
    StreamUpdates,
    UpdatedPiece,
    Weights,
)
from serve.test_shard import SIZE, Stage, Worker

FEW = 200  # elements
TURNS = 4  # updates of a round
MOMENTUM = OptimizerSpec("SGD", ({"lr": 1.0, "momentum": 0.9},))
ADAM = OptimizerSpec("Adam", ({"lr": 1.0},))


class Twin(Stage):
    """A shard, and a slice that the test updates in the same way."""

    def __init__(self, correct: Correction, optimizer: OptimizerSpec = MOMENTUM, size: int = FEW, **setup: Any) -> None:
        super().__init__(size, optimizer, correct=correct, **setup)
        self.correct = correct
        self.slice = Slice(Layout((Tensor("w", (size,)),)), 0, size, optimizer)
        self.version = 0
        self.random = np.random.default_rng(1)
        self.pusher = self.worker(100)

    def update(self, turns: int = TURNS) -> None:
        """Apply one more update to both."""
        gradient = self.random.standard_normal(self.size, dtype=np.float32)
        self.version += 1
        assert self.pusher.push(self.version, gradient) == PushReceived(self.version)
        self.hears()
        self.orders(ApplyUpdates(self.version, (Identity(100, 1, self.version),), (1.0,), None, turns))
        self.slice.step([torch.from_numpy(gradient)], [1.0], [1.0], self.correct if turns > 1 else "none", turns)

    def ahead(self, steps: int) -> Any:
        """Return the weights as predicted for `steps` steps later."""
        return self.slice.ahead(steps, self.correct).numpy()


@pytest.fixture
def twin(request: pytest.FixtureRequest) -> Iterator[Callable[..., Twin]]:
    made: list[Twin] = []

    def make(*arguments: Any, **options: Any) -> Twin:
        made.append(Twin(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "the condition never became true"
        time.sleep(0.002)


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=lambda spec: spec.name)
@pytest.mark.parametrize("correct", CORRECTIONS)
def test_a_pull_is_answered_with_predicted_weights(
    correct: Correction, optimizer: OptimizerSpec, twin: Callable[..., Twin]
) -> None:
    stage = twin(correct, optimizer)
    worker = stage.worker(1)
    for _ in range(6):
        stage.update()
        for expected in (TURNS - 1, 1, 0, None, MAX_STALENESS):
            version, weights = worker.pull(stage.version, expected)
            assert version == stage.version
            assert np.array_equal(weights, stage.ahead(expected or 0)), (expected, "steps")
    assert np.array_equal(stage.ahead(1), stage.ahead(0)) == (correct == "none"), (
        "the prediction must differ for this test"
    )


def test_versions_that_are_applied_already_are_not_predicted(twin: Callable[..., Twin]) -> None:
    """A worker that pulls late gets a newer version, and fewer steps remain until its gradient is applied."""
    stage = twin("full")
    worker = stage.worker(1)
    for _ in range(6):
        stage.update()
    worker.pull(6)
    for asked, expected in ((6, 3), (5, 3), (4, 3), (3, 3), (2, 3), (0, 3), (0, 7), (-(10**18), 3), (4, 0)):
        version, weights = worker.pull(asked, expected)
        assert version == 6
        assert np.array_equal(weights, stage.ahead(max(0, expected - (6 - asked)))), (asked, expected)
    assert not np.array_equal(stage.ahead(3), stage.ahead(2)), "the prediction must differ for this test"


def test_nothing_is_predicted_if_a_round_is_one_update(
    twin: Callable[..., Twin], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a barrier, for example, the correction costs no pass over the model and no buffer."""

    def never(*_: Any) -> None:
        raise AssertionError("there is nothing to predict")

    monkeypatch.setattr(Predictor, "take", never)
    stage, plain = twin("full"), twin("none")
    for _ in range(3):
        for each in (stage, plain):
            each.update(turns=1)
        for expected in (0, None):
            ours, theirs = (each.worker(1).pull(each.version, expected)[1] for each in (stage, plain))
            assert np.array_equal(ours, theirs)
    store = stage.shards[0].await_setup().store
    assert "newest" not in store.slices[0].state()[0]


def test_pulls_of_the_same_prediction_share_it(twin: Callable[..., Twin], monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[tuple[int, int]]()
    real = Slice.ahead

    def counted(self: Slice, steps: int, correct: Correction, out: Any = None) -> Any:
        made.append((steps, out.data_ptr()))
        return real(self, steps, correct, out)

    stage = twin("full")
    stage.update()
    workers = [stage.worker(number) for number in (1, 2, 3)]
    expected = stage.ahead(3)
    monkeypatch.setattr(Slice, "ahead", counted)
    for worker in workers:
        assert np.array_equal(worker.pull(1, 3)[1], expected)
    assert [steps for steps, _ in made] == [3]
    for steps in (2, 1):
        until(lambda: not in_use(stage))
        workers[0].pull(1, steps)
    assert [steps for steps, _ in made] == [3, 2, 1]
    assert len({place for _, place in made}) == 1, "the buffer is reused when no pull sends it"


def test_a_slow_reader_sees_one_prediction_and_delays_nobody(twin: Callable[..., Twin]) -> None:
    """The sockets hold only a part of the answer, and the rest is read when the weights have changed."""
    stage = twin("full", size=SIZE)
    slow, quick = stage.worker(1), stage.worker(2)
    stage.update()
    slow.channel.send(Pull(1, 3))  # its answer is not read yet
    until(lambda: in_use(stage))
    first = stage.ahead(3)
    for _ in range(2):
        stage.update()
        version, weights = quick.pull(stage.version, 2)
        assert version == stage.version
        assert np.array_equal(weights, stage.ahead(2))
    version, weights = slow.weights()
    assert version == 1
    assert np.array_equal(weights, first), "the prediction was changed while it was sent"


def pulls_of(stage: Stage) -> PullServer:
    updates = stage.shards[0].await_setup()
    assert isinstance(updates, WholeUpdates)
    return updates.pulls


def in_use(stage: Stage) -> bool:
    """Return whether a pull is sending the last prediction."""
    last = pulls_of(stage)._predictor._last
    return bool(last and last.users)


def test_an_update_waits_until_a_prediction_is_computed(
    twin: Callable[..., Twin], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = twin("full")
    stage.update()
    shard, real, torn = stage.shards[0], Slice.ahead, list[bool]()
    begun, proceed = threading.Event(), threading.Event()
    mine = shard.await_setup().store.slices[0]

    def slow(self: Slice, steps: int, correct: Correction, out: Any = None) -> Any:
        if self is mine:
            before = self.weights.clone()
            begun.set()
            assert proceed.wait(20.0)
            until(lambda: pulls_of(stage)._paused)  # the shard is about to apply the update
            for _ in range(50):
                time.sleep(0.002)
                torn.append(not torch.equal(before, self.weights))
        return real(self, steps, correct, out)

    monkeypatch.setattr(Slice, "ahead", slow)
    worker = stage.worker(1)
    worker.channel.send(Pull(1, 3))
    assert begun.wait(20.0)
    expected = real(stage.slice, 3, "full").numpy()
    stage.update()
    proceed.set()
    version, weights = worker.weights()
    assert (version, any(torn)) == (1, False)
    assert np.array_equal(weights, expected)
    assert np.array_equal(worker.pull(2)[1], stage.slice.weights.numpy()), "the update is applied afterwards"


@pytest.mark.slow
def test_concurrent_predictions_are_each_of_the_version_that_they_name(twin: Callable[..., Twin]) -> None:
    stage = twin("full", size=50_000, max_transfers=1)
    seen: list[tuple[int, int, Any]] = []
    truth: dict[tuple[int, int], Any] = {}  # version, steps → the prediction
    over = threading.Event()

    def pulls(worker: Worker, expected: int) -> None:
        while not over.is_set():
            version, weights = worker.pull(0, expected)
            seen.append((version, max(0, expected - version), weights))

    threads = [
        threading.Thread(target=pulls, args=(stage.worker(number), 30 + number % 3), daemon=True)
        for number in range(1, 5)
    ]
    for thread in threads:
        thread.start()
    for _ in range(25):
        stage.update()
        truth |= {(stage.version, steps): stage.ahead(steps) for steps in range(40)}
    over.set()
    for thread in threads:
        thread.join(20.0)
    counted = [pulled for pulled in seen if pulled[0] > 0]
    assert len({version for version, _, _ in counted}) > 3
    for version, steps, weights in counted:
        assert np.array_equal(weights, truth[version, steps]), (version, steps)
    assert pulls_of(stage)._reading == 0
    until(lambda: not in_use(stage))


def test_a_pull_that_is_cut_releases_its_prediction(twin: Callable[..., Twin]) -> None:
    stage = twin("full", size=SIZE)
    stage.update()
    worker = stage.worker(1)
    worker.channel.send(Pull(1, 3))
    until(lambda: in_use(stage))
    worker.channel.close()
    until(lambda: not in_use(stage))


def test_a_prediction_that_fails_does_not_block_updates(
    twin: Callable[..., Twin], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If memory runs out, for example, only that connection ends."""
    stage = twin("full")
    stage.update()

    def fails(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with monkeypatch.context() as patch:
        patch.setattr(Slice, "ahead", fails)
        with pytest.raises(ConnectionError):
            stage.worker(1).pull(1, 3)
    stage.update()
    version, weights = stage.worker(2).pull(2, 3)
    assert version == 2
    assert np.array_equal(weights, stage.ahead(3))


def test_a_prediction_in_use_keeps_its_buffer() -> None:
    part = Slice(Layout((Tensor("w", (FEW,)),)), 0, FEW, MOMENTUM)
    store = WholeStore(part, "full")
    store.version = 0
    predictor = Predictor(store)
    first = predictor.take(3)
    assert predictor.take(3) is first
    second = predictor.take(2)
    assert second.buffer.data_ptr() != first.buffer.data_ptr()
    predictor.release(first)
    assert store.take_buffer().data_ptr() not in (first.buffer.data_ptr(), second.buffer.data_ptr()), (
        "one pull still uses it"
    )
    predictor.release(first)
    assert store.take_buffer().data_ptr() == first.buffer.data_ptr(), "no pull uses it any more"
    store.version = 1
    predictor.release(second)
    assert predictor.take(2) is not second, "the version has changed"


# Streamed


PIECES = ((0, 70), (70, 150), (150, FEW))


class Streamed:
    """A shard of several pieces, and slices that the test updates in the same way."""

    def __init__(self, correct: Correction) -> None:
        self.stage = Stage(FEW, MOMENTUM, pieces=PIECES, streamed=True, correct=correct)
        layout = Layout((Tensor("w", (FEW,)),))
        self.slices = [Slice(layout, start, stop, MOMENTUM) for start, stop in PIECES]
        self.correct: Correction = correct
        self.random = np.random.default_rng(1)
        self.number = 0  # of the last StreamUpdates order

    def push(self, worker: Worker, iteration: int, piece: int, gradient: Any) -> Any:
        """Push a piece, and return the updated piece that the shard returns."""
        worker.channel.send(Push(iteration, (1.0,), piece=piece), gradient.data.cast("B"))
        return self.receive(worker, UpdatedPiece(iteration, piece))

    def receive(self, worker: Worker, expected: Any) -> Any:
        """Receive this message, and return its body."""
        start, stop = PIECES[expected.piece]
        place = np.empty(stop - start, dtype=np.float32)
        assert worker.channel.receive(lambda _message, _size: place.data.cast("B")) == expected
        return place

    def update(self, worker: Worker, number: int, iteration: int, expected: int | None) -> None:
        """Apply one more update to both, and assert that the returned pieces are the predicted ones."""
        self.number += 1
        update = Identity(number, 1, iteration)
        self.stage.orders(StreamUpdates(self.number, (update,), (1.0,), True, TURNS, expected))
        for piece, part in enumerate(self.slices):
            gradient = self.random.standard_normal(part.stop - part.start, dtype=np.float32)
            back = self.push(worker, iteration, piece, gradient)
            part.step([torch.from_numpy(gradient)], [1.0], [1.0], self.correct, TURNS)
            assert np.array_equal(back, self.ahead(piece, expected))
        self.stage.hears()

    def ahead(self, piece: int, steps: int | None) -> Any:
        return self.slices[piece].ahead(steps or 0, self.correct).numpy()


@pytest.mark.parametrize("correct", CORRECTIONS)
def test_a_streamed_piece_is_returned_as_predicted(correct: Correction) -> None:
    streamed = Streamed(correct)
    first, other = streamed.stage.worker(1), streamed.stage.worker(2)
    for iteration in range(1, 6):
        streamed.update(first, 1, iteration, expected=3)
        streamed.update(other, 2, iteration, expected=(None, 0, 1)[iteration % 3])
    assert np.array_equal(streamed.ahead(0, 1), streamed.ahead(0, 0)) == (correct == "none")
    # A piece that is pushed again over a new connection is predicted from now: one update was applied since.
    again = streamed.stage.worker(1)
    for piece, (start, stop) in enumerate(PIECES):
        lost = np.full(stop - start, 1000.0, dtype=np.float32)
        assert np.array_equal(streamed.push(again, 5, piece, lost), streamed.ahead(piece, 2))
    # A worker that joins is sent all pieces, as predicted or as they are.
    for expected in (3, 0, None):
        again.channel.send(Pull(10, expected))
        for piece in range(len(PIECES)):
            assert np.array_equal(streamed.receive(again, Weights(10, piece)), streamed.ahead(piece, expected))
    streamed.stage.close()
