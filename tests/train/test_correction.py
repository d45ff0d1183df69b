"""Staleness that is known in advance, over a whole server: what workers are given is what the log makes of it.

The shards' recordings are run again, and every pull that a worker made is compared, bit for bit, with what the slice of
that version says it will be. So the coordinator, the workers and the shards must agree on who is how stale.
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
from paceline.model.correction import Asked, Correction
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
    """What a worker was given."""

    worker: int
    granted: GrantIteration
    version: int
    weights: Any


class Crew:
    """Workers that learn a parabola each, and write down what they are given."""

    def __init__(
        self, optimizer: OptimizerSpec, steps: int = 12, noise: float = 1.0, rates: tuple[float, float] = RATES
    ) -> None:
        self.optimizer, self.steps, self.noise, self.rates = optimizer, steps, noise, rates
        self.pulled: list[Pulled] = []
        self.last: list[Any] = []  # what each had at the end
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
class Retold:
    """A shard's recording, run again."""

    correct: Correction
    predicted: int  # pulls that were of something else than the weights as they were
    turns: list[int]  # of each Apply
    weights: Any  # in the end
    start: int
    stop: int


def retell(path: Path, pulled: list[Pulled]) -> Retold:
    """Run it again, and compare every pull with what the slice of its version says it will be."""
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
    return Retold(correct, predicted, turns, part.weights.numpy(), part.start, part.stop)


def seen(folder: Path, crew: Crew) -> list[Retold]:
    """What a recorded job came to. All workers end with the true weights, those of the checkpoint."""
    shards = [retell(path, crew.pulled) for path in sorted((folder / "record").glob("*.rec"))]
    assert all(part.same and part.whole for part in replay.weights(folder / "record"))
    (found,) = [checkpoint.read(folder / "job")]
    saved = np.concatenate([array.ravel() for array in checkpoint.weights(found).values()])
    assert np.array_equal(saved, np.concatenate([shard.weights for shard in shards]))
    assert all(np.array_equal(last, saved) for last in crew.last), "the last model is no prediction"
    return shards


def served(folder: Path, policy: str | Policy, crew: Crew, workers: int, correct: Asked) -> list[Retold]:
    saving = CheckpointPlan(folder / "job", updates=1000)
    with job(policy, 2, workers, record=folder / "record", saving=saving, correct=correct) as running:
        crew.work(running, workers)
    return seen(folder, crew)


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=lambda spec: spec.name)
@pytest.mark.parametrize("correct", ["auto", "predict", "round", "full"])
def test_workers_are_given_weights_as_they_will_be(correct: Asked, optimizer: OptimizerSpec, tmp_path: Path) -> None:
    crew = Crew(optimizer)
    for shard in served(tmp_path, "r2sp:weights=mean", crew, 3, correct):
        assert shard.correct == ("full" if correct == "auto" else correct)
        assert shard.predicted > 15, "most pulls were predictions"
        assert max(shard.turns) == 3
        if shard.stop == SIZE:  # statistics are averaged, and nobody predicts them
            assert len({each.weights[-10:].tobytes() for each in crew.pulled}) > 3
    assert {each.granted.expected for each in crew.pulled} >= {2}


@pytest.mark.parametrize(
    ("policy", "workers", "turns"),
    [("r2sp:groups=2", 4, 2), ("groups:count=2,inner=bsp,outer=r2sp", 4, 2), ("r2sp", 5, 5)],
)
def test_a_round_is_as_many_turns_as_there_are(policy: str, workers: int, turns: int, tmp_path: Path) -> None:
    for shard in served(tmp_path, policy, Crew(MOMENTUM, 8), workers, "full"):
        assert max(shard.turns) == turns
        assert shard.predicted > 0


@pytest.mark.parametrize(
    ("policy", "optimizer", "correct", "comes_to"),
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
def test_where_nothing_is_known_to_be_stale_nothing_is_done(
    policy: str,
    optimizer: OptimizerSpec,
    correct: Asked,
    comes_to: Correction,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even a copy is made: weights are sent as they lie."""

    def never(*_: Any) -> None:
        raise AssertionError("there is nothing to foresee")

    monkeypatch.setattr("paceline.serve.shard.prediction.Predictor.take", never)
    crew = Crew(optimizer, 6)
    for shard in served(tmp_path, policy, crew, 3, correct):
        assert (shard.correct, shard.predicted) == (comes_to, 0)
    if optimizer is MOMENTUM and comes_to == "full":
        assert {each.granted.expected for each in crew.pulled} == {None}


def test_one_worker_under_a_barrier_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    ends = []
    for correct in ("none", "full", "auto"):
        crew = Crew(MOMENTUM)
        served(tmp_path / correct, "bsp", crew, 1, correct)
        ends.append(crew.last[0])
    assert np.array_equal(ends[0], ends[1])
    assert np.array_equal(ends[0], ends[2])


def test_workers_that_make_their_own_steps_are_given_weights_as_they_are() -> None:
    """They push models: what they were given goes into them."""
    for policy in ("safa", "groups:count=2,inner=safa,outer=r2sp"):
        with job(policy, 1, 2, correct="full") as running:
            crew = Crew(MOMENTUM, 2)
            crew.work(running, 2)
            assert running.coordinator.agreement.correct == "none"


def test_who_joins_late_is_given_a_prediction_too(tmp_path: Path) -> None:
    crew = Crew(MOMENTUM, 10)
    came = threading.Event()
    saving = CheckpointPlan(tmp_path / "job", updates=1000)
    with job("r2sp", 2, 2, record=tmp_path / "record", saving=saving, correct="full") as running:

        def late(where: str) -> None:
            assert came.wait(30.0)
            crew.worker(2)(where)

        def early(where: str) -> None:
            note = crew._note

            def noted(number: int, client: Client, weights: Any) -> None:
                note(number, client, weights)
                if client.granted.iteration == 4:
                    came.set()

            crew._note = noted  # type: ignore[method-assign]
            crew.worker(0)(where)

        running.work(early, crew.worker(1), late)
        running.finish()
    seen(tmp_path, crew)
    first = next(each for each in crew.pulled if each.worker == 2)
    assert first.version > 0
    assert first.granted.expected is not None


class Says(R2SP):
    """A policy that always expects the same."""

    says = 0

    def _grant(self, *arguments: Any) -> Grant:
        grant = super()._grant(*arguments)
        return Grant(grant.worker, grant.batch_size, self.says)


@pytest.mark.parametrize(("says", "told"), [(-7, 0), (10**12, MAX_STALENESS)])
def test_what_a_policy_expects_is_kept_within_reason(says: int, told: int, tmp_path: Path) -> None:
    policy = Says()
    policy.says = says
    crew = Crew(OptimizerSpec("SGD", ({"lr": 1.0, "momentum": 0.5}, {"lr": 1.0})), 3)
    with job(policy, 1, 2, correct="predict") as running:
        crew.work(running, 2)
    assert {each.granted.expected for each in crew.pulled} == {told}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_parabola_that_momentum_would_run_away_on_is_learned(streamed: bool) -> None:
    """Six take turns, and a round moves the weights as far as 0.6 times the gradient, and momentum of 0.9, would."""
    ends = {}
    for correct in ("none", "full"):
        crew = Crew(OptimizerSpec("SGD", ({"lr": 1.0, "momentum": 0.9},) * 2), 25, noise=0.0, rates=(0.6, 0.6))
        with job("r2sp:weights=mean", 2, 6, correct=correct, streamed=streamed) as running:
            crew.work(running, 6)
        ends[correct] = float(np.abs(crew.last[0][:50]).max())
    assert ends["none"] > 100, "it has run away from 1"
    assert ends["full"] < 0.5


# What cannot be had


def test_an_optimizer_whose_momentum_is_not_known_is_refused_in_a_sentence() -> None:
    unknown = OptimizerSpec("RMSprop", ({"lr": 1.0, "momentum": 0.9}, {"lr": 1.0}))
    for asked in ("predict", "round", "full"):
        with job("r2sp", 1, 2, correct=asked) as running:
            why = (
                f"^--correct {asked} cannot be had: staleness is corrected for by the momentum of SGD, Adam and AdamW, "
                "and that of RMSprop is not known; leave it at auto.$"
            )
            with pytest.raises(ConnectionError, match=why):
                Crew(unknown).worker(0)(running.address)
            crew = Crew(MOMENTUM, 2)  # nothing came of it: another job's workers may come
            crew.work(running, 2)
    for asked in ("auto", "none"):
        with job("r2sp", 1, 2, correct=asked) as running:
            Crew(unknown, 2).work(running, 2)
            assert running.coordinator.agreement.correct == "none"


def test_what_cannot_be_had_is_told_before_a_job_is_gone_on_with(tmp_path: Path) -> None:
    with job("r2sp", 1, 1, saving=CheckpointPlan(tmp_path, updates=1000)) as running:
        Crew(OptimizerSpec("RMSprop", ({"lr": 1.0}, {"lr": 1.0})), 2).work(running, 1)

    async def resume(correct: Asked) -> None:
        async with Server(lambda: make("r2sp"), ServerConfig(correct=correct), resume=tmp_path):
            pass

    asyncio.run(resume("auto"))
    with pytest.raises(ValueError, match=r"^--correct full cannot be had: .* RMSprop is not known; leave it at auto.$"):
        asyncio.run(resume("full"))


def test_there_are_no_such_terms() -> None:
    with pytest.raises(ValueError, match=r"^correct must be auto, none, predict, round or full, not 'fool'$"):
        ServerConfig(correct="fool")  # type: ignore[arg-type]


# Checkpoints


@pytest.mark.parametrize("then", ["full", "none", "predict"])
def test_a_job_goes_on_from_its_checkpoint_whatever_the_correction(then: Asked, tmp_path: Path) -> None:
    before = Crew(MOMENTUM, 6)
    with job("r2sp", 2, 3, saving=CheckpointPlan(tmp_path / "job", updates=1000), correct="full") as running:
        before.work(running, 3)
    found = checkpoint.read(tmp_path / "job")
    arrays, _ = checkpoint.load_shard(found.folder, 0)
    assert "0/newest" in arrays
    after, saving, policy = Crew(MOMENTUM, 6), CheckpointPlan(tmp_path / "job", updates=1000), Says()
    policy.says = 2  # from the first Grant on, when there is but one in the ring
    with job(policy, 2, 3, restored=found, record=tmp_path / "record", saving=saving, correct=then) as running:
        after.work(running, 3)
    for shard in seen(tmp_path, after):
        assert shard.correct == then
        assert (shard.predicted > 0) == (then != "none")
    assert any(each.version == found.version for each in after.pulled), "what the checkpoint's own state foresees"


# Streamed


def test_streamed_what_comes_back_is_what_it_will_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.model.description.MIN_PIECE_ELEMENTS", 1)
    orders: list[StreamUpdates] = []
    made: dict[tuple[int, int, int, int], Any] = {}  # worker, iteration, from where to where → what came of it
    order, apply = StreamedStore.order, PieceWork.apply

    def ordered(self: StreamedStore, stream: StreamUpdates) -> list[PieceWork]:
        orders.append(stream)
        return order(self, stream)

    def applied(self: PieceWork) -> None:
        apply(self)
        ahead = self.slice.ahead(self.entry.order.expected or 0, "full")
        for update in self.updates:
            made[update.worker, update.iteration, self.slice.start, self.slice.stop] = ahead.numpy()

    monkeypatch.setattr(StreamedStore, "order", ordered)
    monkeypatch.setattr(PieceWork, "apply", applied)
    workers, crew = 3, Crew(MOMENTUM)
    with job(
        "r2sp", 2, workers, streamed=True, saving=CheckpointPlan(tmp_path, updates=1000), correct="full"
    ) as running:
        crew.work(running, workers)
    returned = [each for each in crew.pulled if not each.granted.pull]
    assert len(returned) > 20
    for each in returned:
        mine = {key[2:]: ahead for key, ahead in made.items() if key[:2] == (each.worker, each.granted.iteration - 1)}
        assert len(mine) > 4, "pieces"
        for (start, stop), ahead in mine.items():
            assert np.array_equal(each.weights[start:stop], ahead)
    assert {(stream.turns, stream.expected) for stream in orders} >= {(workers, workers - 1)}
    saved = np.concatenate([array.ravel() for array in checkpoint.weights(checkpoint.read(tmp_path)).values()])
    assert all(np.array_equal(last, saved) for last in crew.last), "the last model is no prediction"


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
        Crew(optimizer, 5).work(running, 3)
