"""Staleness correction over a real server: workers pull the weights that are predicted for the time of their update.

The tests replay the shards' recordings and compare every pull of a worker, bit for bit, with the prediction that the
slice of that version makes. The coordinator, the workers and the shards must therefore agree on the staleness.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from paceline.job.saving import MAX_STALENESS
from paceline.model import checkpoint
from paceline.model.correction import Correction, CorrectionOption
from paceline.model.description import Description
from paceline.model.layout import STATISTICS, Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.model.slice import Slice
from paceline.policies import Policy, make
from paceline.policies.contract import Grant
from paceline.policies.r2sp import R2SP
from paceline.serve import replay
from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan
from paceline.serve.coordinator.config import ServerConfig
from paceline.serve.environment import address
from paceline.serve.server import Server
from paceline.serve.shard import recording
from paceline.serve.shard.recording import RecordedUpdate
from paceline.serve.shard.store import HeldUpdate, WholeStore
from paceline.serve.shard.streamed_store import PieceWork, StreamedStore
from paceline.serve.wire.messages import ApplyUpdates, GrantIteration, InitialWeights, Setup, StreamUpdates
from paceline.serve.worker.client import Client
from train.jobs import Job, job

SIZE = 60
LAYOUT = Layout((Tensor("a", (31,)), Tensor("b", (19,), group=1), Tensor("mean", (10,), group=STATISTICS)))
RATES = (0.02, 0.01)
MOMENTUM = OptimizerSpec("SGD", ({"lr": 1.0, "momentum": 0.9}, {"lr": 1.0, "momentum": 0.5, "nesterov": True}))
PLAIN = OptimizerSpec("SGD", ({"lr": 1.0}, {"lr": 1.0}))
ADAM = OptimizerSpec("Adam", ({"lr": 1.0}, {"lr": 1.0}))


def described(optimizer: OptimizerSpec) -> bytes:
    return Description(LAYOUT, optimizer).as_json()


@dataclass
class Pulled:
    """What a worker pulled."""

    worker: int
    granted: GrantIteration
    version: int
    weights: Any


class Learners:
    """Workers that each minimize a parabola and record what they pull."""

    def __init__(
        self, optimizer: OptimizerSpec, steps: int = 12, noise: float = 1.0, rates: tuple[float, float] = RATES
    ) -> None:
        self.optimizer, self.steps, self.noise, self.rates = optimizer, steps, noise, rates
        self.pulled: list[Pulled] = []
        self.last: list[Any] = []  # the final weights of each worker
        self._lock = threading.Lock()

    def worker(self, number: int) -> Callable[[str], None]:
        def run(where: str) -> None:
            chance = np.random.default_rng(number)
            weights, gradient = np.ones(SIZE, np.float32), np.zeros(SIZE, np.float32)
            client = Client(address(where), described(self.optimizer), worker=number)
            try:
                client.begin(weights.data.cast("B"))
                for _ in range(self.steps):
                    self._note(number, client, weights)
                    gradient[:] = weights + self.noise * chance.standard_normal(SIZE, dtype=np.float32)
                    client.exchange(
                        gradient.data.cast("B"),
                        weights.data.cast("B"),
                        batch_size=1,
                        compute_seconds=0.001,
                        rates=self.rates,
                    )
                self._note(number, client, weights)
                assert client.finish(weights.data.cast("B"))
                with self._lock:
                    self.last.append(weights.copy())
            finally:
                client.close()

        return run

    def _note(self, number: int, client: Client, weights: Any) -> None:
        with self._lock:
            self.pulled.append(Pulled(number, client.granted, client.version, weights.copy()))

    def work(self, running: Job, count: int) -> None:
        running.work(*(self.worker(number) for number in range(count)))
        running.finish()


@dataclass
class ReplayedShard:
    """The result of replaying a shard's recording."""

    correct: Correction
    predicted: int  # the number of pulls that differed from the current weights
    turns: list[int]  # one entry for each Apply
    weights: Any  # the final weights
    start: int
    stop: int


def replay_shard(path: Path, pulled: list[Pulled]) -> ReplayedShard:
    """Replay a recording, and compare every pull with the prediction of the slice of that version."""
    store: WholeStore | None = None
    correct: Correction = "none"
    predicted, turns = 0, list[int]()
    expected = {(each.worker, each.granted.iteration): each.granted.expected for each in pulled}

    def compare() -> None:
        nonlocal predicted
        assert store is not None
        part = store.slice
        for each in [each for each in pulled if each.version == store.version]:
            grant = each.granted
            steps = max(0, (grant.expected or 0) - (each.version - grant.version))
            ahead = part.ahead(steps, correct).numpy()
            assert np.array_equal(each.weights[part.start : part.stop], ahead), (each.worker, grant, each.version)
            predicted += not np.array_equal(ahead, part.weights.numpy())

    for message, body in recording._frames(path):
        match message:
            case Setup():
                correct, store = message.correct, recording._set_up(message, body, path)
                compare()
            case InitialWeights():
                assert store is not None
                store.slice.weights.copy_(torch.frombuffer(bytearray(body), dtype=torch.float32))
                store.version = 0
                compare()
            case RecordedUpdate(update, rates):
                assert store is not None
                store.put(update, HeldUpdate(torch.frombuffer(bytearray(body), dtype=torch.float32), rates))
            case ApplyUpdates():
                assert store is not None
                known = [expected[update.worker, update.iteration] for update in message.updates]
                assert message.turns == max(1 if each is None else each + 1 for each in known)
                turns.append(message.turns)
                store.apply(message)
                store.applied(message)
                compare()
    assert store is not None
    part = store.slice
    return ReplayedShard(correct, predicted, turns, part.weights.numpy(), part.start, part.stop)


def replay_job(folder: Path, learners: Learners) -> list[ReplayedShard]:
    """Replay a recorded job. All workers must end with the true weights, which are those of the checkpoint."""
    shards = [replay_shard(path, learners.pulled) for path in sorted((folder / "record").glob("*.rec"))]
    assert all(part.same and part.whole for part in replay.weights(folder / "record"))
    (found,) = [checkpoint.read(folder / "job")]
    saved = np.concatenate([array.ravel() for array in checkpoint.weights(found).values()])
    assert np.array_equal(saved, np.concatenate([shard.weights for shard in shards]))
    assert all(np.array_equal(last, saved) for last in learners.last), "the last model is no prediction"
    return shards


def run_job(
    folder: Path, policy: str | Policy, learners: Learners, workers: int, correct: CorrectionOption
) -> list[ReplayedShard]:
    saving = CheckpointPlan(folder / "job", updates=1000)
    with job(policy, 2, workers, record=folder / "record", saving=saving, correct=correct) as running:
        learners.work(running, workers)
    return replay_job(folder, learners)


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=lambda spec: spec.name)
@pytest.mark.parametrize("correct", ["auto", "predict", "round", "full"])
def test_workers_pull_predicted_weights(correct: CorrectionOption, optimizer: OptimizerSpec, tmp_path: Path) -> None:
    learners = Learners(optimizer)
    for shard in run_job(tmp_path, "r2sp:weights=mean", learners, 3, correct):
        assert shard.correct == ("full" if correct == "auto" else correct)
        assert shard.predicted > 15, "most pulls were predictions"
        assert max(shard.turns) == 3
        if shard.stop == SIZE:  # statistics are averaged and not predicted
            assert len({each.weights[-10:].tobytes() for each in learners.pulled}) > 3
    assert {each.granted.expected for each in learners.pulled} >= {2}


@pytest.mark.parametrize(
    ("policy", "workers", "turns"),
    [("r2sp:groups=2", 4, 2), ("groups:count=2,inner=bsp,outer=r2sp", 4, 2), ("r2sp", 5, 5)],
)
def test_a_round_has_a_turn_for_each_member_of_the_ring(policy: str, workers: int, turns: int, tmp_path: Path) -> None:
    for shard in run_job(tmp_path, policy, Learners(MOMENTUM, 8), workers, "full"):
        assert max(shard.turns) == turns
        assert shard.predicted > 0


@pytest.mark.parametrize(
    ("policy", "optimizer", "correct", "used"),
    [
        ("r2sp", MOMENTUM, "none", "none"),
        ("r2sp", PLAIN, "auto", "none"),
        ("r2sp", PLAIN, "full", "none"),
        ("bsp", MOMENTUM, "auto", "full"),
        ("bsp", ADAM, "full", "full"),
        ("ssp", MOMENTUM, "full", "full"),
        ("asp", MOMENTUM, "auto", "full"),
    ],
    ids=lambda value: value.name if isinstance(value, OptimizerSpec) else str(value),
)
def test_without_a_known_staleness_nothing_is_predicted(
    policy: str,
    optimizer: OptimizerSpec,
    correct: CorrectionOption,
    used: Correction,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weights are sent without even a copy."""

    def never(*_: Any) -> None:
        raise AssertionError("there is nothing to predict")

    monkeypatch.setattr("paceline.serve.shard.prediction.Predictor.take", never)
    learners = Learners(optimizer, 6)
    for shard in run_job(tmp_path, policy, learners, 3, correct):
        assert (shard.correct, shard.predicted) == (used, 0)
    if optimizer is MOMENTUM and used == "full":
        assert {each.granted.expected for each in learners.pulled} == {None}


def test_correction_does_not_change_a_single_bit_for_one_worker_under_a_barrier(tmp_path: Path) -> None:
    ends = []
    for correct in ("none", "full", "auto"):
        learners = Learners(MOMENTUM)
        run_job(tmp_path / correct, "bsp", learners, 1, correct)
        ends.append(learners.last[0])
    assert np.array_equal(ends[0], ends[1])
    assert np.array_equal(ends[0], ends[2])


def test_workers_that_push_models_pull_weights_without_prediction() -> None:
    """The pulled weights become part of the model that they push."""
    for policy in ("safa", "groups:count=2,inner=safa,outer=r2sp"):
        with job(policy, 1, 2, correct="full") as running:
            learners = Learners(MOMENTUM, 2)
            learners.work(running, 2)
            assert running.coordinator.agreement.correct == "none"


def test_a_worker_that_joins_late_pulls_a_prediction_too(tmp_path: Path) -> None:
    learners = Learners(MOMENTUM, 10)
    others_trained = threading.Event()
    saving = CheckpointPlan(tmp_path / "job", updates=1000)
    with job("r2sp", 2, 2, record=tmp_path / "record", saving=saving, correct="full") as running:

        def late(where: str) -> None:
            assert others_trained.wait(30.0)
            learners.worker(2)(where)

        def early(where: str) -> None:
            note = learners._note

            def noted(number: int, client: Client, weights: Any) -> None:
                note(number, client, weights)
                if client.granted.iteration == 4:
                    others_trained.set()

            learners._note = noted  # type: ignore[method-assign]
            learners.worker(0)(where)

        running.work(early, learners.worker(1), late)
        running.finish()
    replay_job(tmp_path, learners)
    first = next(each for each in learners.pulled if each.worker == 2)
    assert first.version > 0
    assert first.granted.expected is not None


class FixedExpectation(R2SP):
    """A policy that always expects the same staleness."""

    expected = 0

    def joined(self, *arguments: Any) -> Any:
        return self._with_expectation(super().joined(*arguments))

    def ready(self, *arguments: Any) -> Any:
        return self._with_expectation(super().ready(*arguments))

    def arrived(self, *arguments: Any) -> Any:
        return self._with_expectation(super().arrived(*arguments))

    def left(self, *arguments: Any) -> Any:
        return self._with_expectation(super().left(*arguments))

    def woke(self, *arguments: Any) -> Any:
        return self._with_expectation(super().woke(*arguments))

    def _with_expectation(self, decisions: list[Any]) -> list[Any]:
        return [
            Grant(decision.worker, decision.batch_size, self.expected) if isinstance(decision, Grant) else decision
            for decision in decisions
        ]


@pytest.mark.parametrize(("expected", "clamped"), [(-7, 0), (10**12, MAX_STALENESS)])
def test_the_expected_staleness_is_clamped(expected: int, clamped: int, tmp_path: Path) -> None:
    policy = FixedExpectation()
    policy.expected = expected
    learners = Learners(OptimizerSpec("SGD", ({"lr": 1.0, "momentum": 0.5}, {"lr": 1.0})), 3)
    with job(policy, 1, 2, correct="predict") as running:
        learners.work(running, 2)
    assert {each.granted.expected for each in learners.pulled} == {clamped}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_correction_converges_where_stale_momentum_diverges(streamed: bool) -> None:
    """Six workers take turns. A round moves the weights like one step with a rate of 0.6 and momentum of 0.9.

    The weights swing around 0. Where they are at the end depends on the order of the turns, so the size of the last
    swings counts.
    """
    swings = {}
    for correct in ("none", "full"):
        learners = Learners(OptimizerSpec("SGD", ({"lr": 1.0, "momentum": 0.9},) * 2), 40, noise=0.0, rates=(0.6, 0.6))
        with job("r2sp:weights=mean", 2, 6, correct=correct, streamed=streamed) as running:
            learners.work(running, 6)
        newest = max(each.version for each in learners.pulled)
        last = [each.weights[:50] for each in learners.pulled if each.version > newest - 30]
        swings[correct] = float(np.abs(last).max())
    assert swings["none"] > 100, "starting from 1, it has diverged"
    assert swings["full"] < 0.5


# Optimizers that cannot be corrected


def test_an_optimizer_of_unknown_momentum_is_refused_in_one_sentence() -> None:
    unknown = OptimizerSpec("RMSprop", ({"lr": 1.0, "momentum": 0.9}, {"lr": 1.0}))
    for asked in ("predict", "round", "full"):
        with job("r2sp", 1, 2, correct=asked) as running:
            why = (
                f"^--correct {asked} cannot be had: staleness is corrected by the momentum of SGD, Adam and AdamW, "
                "and that of RMSprop is not known; leave it at auto.$"
            )
            with pytest.raises(ConnectionError, match=why):
                Learners(unknown).worker(0)(running.address)
            learners = Learners(MOMENTUM, 2)  # the refusal changed nothing: workers with another optimizer may join
            learners.work(running, 2)
    for asked in ("auto", "none"):
        with job("r2sp", 1, 2, correct=asked) as running:
            Learners(unknown, 2).work(running, 2)
            assert running.coordinator.agreement.correct == "none"


@pytest.mark.slow
def test_an_impossible_correction_is_refused_before_a_job_is_resumed(tmp_path: Path) -> None:
    with job("r2sp", 1, 1, saving=CheckpointPlan(tmp_path, updates=1000)) as running:
        Learners(OptimizerSpec("RMSprop", ({"lr": 1.0}, {"lr": 1.0})), 2).work(running, 1)

    async def resume(correct: CorrectionOption) -> None:
        async with Server(lambda: make("r2sp"), ServerConfig(correct=correct), resume=tmp_path):
            pass

    asyncio.run(resume("auto"))
    with pytest.raises(ValueError, match=r"^--correct full cannot be had: .* RMSprop is not known; leave it at auto.$"):
        asyncio.run(resume("full"))


def test_an_unknown_correction_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^correct must be auto, none, predict, round or full, not 'fool'$"):
        ServerConfig(correct="fool")  # type: ignore[arg-type]


# Checkpoints


@pytest.mark.parametrize("then", ["full", "none", "predict"])
def test_a_job_continues_from_its_checkpoint_with_any_correction(then: CorrectionOption, tmp_path: Path) -> None:
    before = Learners(MOMENTUM, 6)
    with job("r2sp", 2, 3, saving=CheckpointPlan(tmp_path / "job", updates=1000), correct="full") as running:
        before.work(running, 3)
    found = checkpoint.read(tmp_path / "job")
    arrays, _ = checkpoint.load(checkpoint.shard_file(found.folder, 0))
    assert "0/newest" in arrays
    after, saving, policy = Learners(MOMENTUM, 6), CheckpointPlan(tmp_path / "job", updates=1000), FixedExpectation()
    policy.expected = 2  # from the first Grant on, when the ring has only one member
    with job(policy, 2, 3, restored=found, record=tmp_path / "record", saving=saving, correct=then) as running:
        after.work(running, 3)
    for shard in replay_job(tmp_path, after):
        assert shard.correct == then
        assert (shard.predicted > 0) == (then != "none")
    assert any(each.version == found.version for each in after.pulled), "a prediction from the restored optimizer state"


# Streamed


def test_streamed_updates_return_predicted_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.model.description.MIN_PIECE_ELEMENTS", 1)
    orders: list[StreamUpdates] = []
    predictions: dict[tuple[int, int, int, int], Any] = {}  # by worker, iteration, start and stop
    order, apply = StreamedStore.order, PieceWork.apply

    def ordered(self: StreamedStore, stream: StreamUpdates) -> list[PieceWork]:
        orders.append(stream)
        return order(self, stream)

    def applied(self: PieceWork) -> None:
        apply(self)
        ahead = self.slice.ahead(self.entry.order.expected or 0, "full")
        for update in self.updates:
            predictions[update.worker, update.iteration, self.slice.start, self.slice.stop] = ahead.numpy()

    monkeypatch.setattr(StreamedStore, "order", ordered)
    monkeypatch.setattr(PieceWork, "apply", applied)
    workers, learners = 3, Learners(MOMENTUM)
    with job(
        "r2sp", 2, workers, streamed=True, saving=CheckpointPlan(tmp_path, updates=1000), correct="full"
    ) as running:
        learners.work(running, workers)
    returned = [each for each in learners.pulled if not each.granted.pull]
    assert len(returned) > 20
    for each in returned:
        mine = {
            key[2:]: ahead for key, ahead in predictions.items() if key[:2] == (each.worker, each.granted.iteration - 1)
        }
        assert len(mine) > 4, "pieces"
        for (start, stop), ahead in mine.items():
            assert np.array_equal(each.weights[start:stop], ahead)
    assert {(stream.turns, stream.expected) for stream in orders} >= {(workers, workers - 1)}
    saved = np.concatenate([array.ravel() for array in checkpoint.weights(checkpoint.read(tmp_path)).values()])
    assert all(np.array_equal(last, saved) for last in learners.last), "the last model is no prediction"


@pytest.mark.parametrize(("policy", "optimizer"), [("bsp:pipeline=true", MOMENTUM), ("asp", ADAM), ("r2sp", PLAIN)])
def test_streamed_where_nothing_is_known_to_be_stale_nothing_is_done(
    policy: str, optimizer: OptimizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Slice.ahead

    def copies(self: Slice, steps: int, correct: Correction, out: Any = None) -> Any:
        assert not steps
        return real(self, steps, correct, out)

    monkeypatch.setattr(Slice, "ahead", copies)
    with job(policy, 2, 3, streamed=True) as running:
        Learners(optimizer, 5).work(running, 3)
