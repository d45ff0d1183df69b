"""Streamed updates over a real server: equal to one process, within the policy's promises, and with checkpoints.

Pieces are as small as possible here, so that a small model has many.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from paceline.model import checkpoint
from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan
from paceline.serve.environment import address
from paceline.serve.wire.frames import WireError
from paceline.serve.wire.messages import GradientReady
from paceline.serve.worker.client import Client
from paceline.serve.worker.gradient import OutgoingGradient
from paceline.serve.worker.streamed_exchange import StreamedExchange
from serve import workers
from train.jobs import Job, job
from train.lessons import OPTIMIZERS, alone, check_equals_one_process, check_trains, data, student

POLICIES = ["bsp:pipeline=true", "asp", "ssp", "dssp", "r2sp:groups=2", "r2sp"]
# On a busy machine R²SP cancels late pushes, and a part of a cancelled push may stay in the model. Tests that check
# exact weights therefore let it wait.
PATIENT = [*POLICIES[:-2], "r2sp:groups=2,patience=10000", "r2sp:patience=10000"]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.model.description.MIN_PIECE_ELEMENTS", 1)


def pieces_of(running: Job) -> list[int]:
    """Return the number of pieces of each shard."""
    return [len(pieces) for pieces in running.coordinator.agreement.pieces()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("shards", [1, 3])
def test_pipelined_bsp_by_the_mean_equals_one_process_on_the_joint_batch(optimizer: str, shards: int) -> None:
    def check(running: Job) -> None:
        assert min(pieces_of(running)) > 1

    check_equals_one_process("bsp:weights=mean,pipeline=true", optimizer, shards, check)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_one_worker_equals_plain_training(policy: str, optimizer: str) -> None:
    x, y = data(24)
    with job(policy, shards=2, streamed=True) as running:
        (result,) = running.work(student(optimizer, x, y, 8))
    torch.testing.assert_close(result, alone(optimizer, x, y, 8), rtol=1e-6, atol=1e-7)


MORE = pytest.mark.matrix  # `make test` runs each policy with two shards only


@pytest.mark.parametrize("shards", [pytest.param(1, marks=MORE), 2, pytest.param(3, marks=MORE)])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_trains_streamed(policy: str, shards: int) -> None:
    check_trains(policy, shards, streamed=True)


# Checkpoints


@pytest.mark.parametrize("policy", PATIENT)
def test_every_checkpoint_holds_one_version_of_all_pieces(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints are written during training. Each piece holds exactly the samples that the checkpoint counts."""
    monkeypatch.setattr(checkpoint, "KEPT", 1000)
    with job(policy, shards=2, workers=3, streamed=True, saving=CheckpointPlan(tmp_path, updates=3)) as running:
        running.work(*[lambda where: workers.work(where, 720)] * 3)
        running.finish()
    found = [checkpoint.read(folder) for folder in sorted(tmp_path.glob("version-*"))]
    assert len(found) > 3
    for each in found:
        done = each.job["samples"]["trained"] if each.job["samples"] else 0
        for name, tensor in checkpoint.weights(each).items():
            assert np.all(tensor == done), (each.version, name)
    assert done == 720


@pytest.mark.parametrize("policy", ["bsp:pipeline=true", PATIENT[-1], "asp"])
def test_a_streamed_job_continues_from_its_checkpoint(policy: str, tmp_path: Path) -> None:
    with job(policy, shards=2, workers=2, streamed=True, saving=CheckpointPlan(tmp_path, updates=1000)) as running:
        running.work(*[lambda where: workers.work(where, 80, updates=5)] * 2)
        running.finish()
    found = checkpoint.read(tmp_path)
    assert found.job["samples"]["trained"] == 40
    with job(policy, shards=2, workers=2, streamed=True, restored=found) as running:
        running.work(*[lambda where: workers.work(where, 80)] * 2)
        running.finish()
        assert running.coordinator.samples is not None
        assert running.coordinator.samples.all_done
        assert pulled_by_a_new_worker(running) == [80.0] * workers.SIZE


def pulled_by_a_new_worker(running: Job) -> list[float]:
    held = np.zeros(workers.SIZE, np.float32)
    client = Client(address(running.address), workers.described(), worker=99)
    client.begin(held.data.cast("B"))
    client.close()
    return held.tolist()


# Workers that die during a push


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end, "timeout"
        time.sleep(0.005)


class Doomed:
    """A worker that pushes some pieces of an update and dies. Its update would add 1000 to every element."""

    def __init__(self, where: str, number: int) -> None:
        self.client = Client(address(where), workers.described(), worker=number)
        self.weights, self.gradient = np.zeros(workers.SIZE, np.float32), np.full(workers.SIZE, -1000.0, np.float32)

    def begin(self) -> None:
        self.client.begin(self.weights.data.cast("B"))

    def push(self, *pieces: int) -> list[tuple[int, int]]:
        """Push these pieces to each shard, and return their ranges in the model."""
        joins, iteration = self.client._incarnation, self.client.granted.iteration
        joins._say(joins._state.announce_ready, GradientReady(iteration, joins.version, 1, 0.001, None))
        if joins.welcome.gated:
            joins._await(lambda: joins._state.turn(iteration) == "now")
        exchange = StreamedExchange(
            iteration,
            OutgoingGradient(self.gradient.data.cast("B"), (1.0,), "float32", 1),
            self.weights.data.cast("B"),
            lambda message: None,
        )
        for part, piece in itertools.product(joins._transfers.parts, pieces):
            exchange.send(part, piece)
        return [part.pieces[piece] for part, piece in itertools.product(joins._transfers.parts, pieces)]

    def die(self) -> None:
        self.client._incarnation.end(WireError("killed"))


@pytest.mark.parametrize("pieces", [(), (0,), (0, 2, 3), (5, 4, 3, 2, 1, 0)], ids=str)
@pytest.mark.parametrize("policy", PATIENT)
def test_a_worker_that_dies_during_a_push_blocks_nobody_and_leaves_only_the_pushed_pieces(
    policy: str, pieces: tuple[int, ...]
) -> None:
    with job(policy, shards=2, workers=3, streamed=True, lease=1.0) as running:
        doomed = Doomed(running.address, 2)
        pushed: list[tuple[int, int]] = []

        def die(_where: str) -> None:
            doomed.begin()
            pushed.extend(doomed.push(*pieces))
            time.sleep(0.2)  # by now the others have pushed, and wait for this worker if their policy requires it
            doomed.die()

        running.work(*[lambda where: workers.work(where, 60)] * 2, die)
        wait_until(lambda: 2 not in running.coordinator.state.roster.training)
        assert running.coordinator.samples is not None
        assert running.coordinator.samples.all_done
        seen = np.array(pulled_by_a_new_worker(running))
    was_pushed = np.zeros(workers.SIZE, dtype=bool)
    for start, stop in pushed:
        was_pushed[start:stop] = True
    assert np.all(seen[~was_pushed] == 60.0)
    assert set(seen[was_pushed]) <= {60.0, 1060.0}
    if policy == "asp":  # every piece is applied on arrival
        assert np.all(seen[was_pushed] == 1060.0)
