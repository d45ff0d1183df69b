"""The coordinator's own books, against clients that come, go and come back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from paceline.model import checkpoint
from paceline.model.description import Description
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.observe.trace import Cancelled, Left
from paceline.policies.asp import ASP
from paceline.policies.contract import Cancel, Decisions, Grant, Stream, Update, WorkerId
from paceline.rlp.policy import RLP
from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan
from paceline.serve.environment import address
from paceline.serve.wire.frames import WireError
from paceline.serve.wire.messages import GradientReady
from paceline.serve.worker.client import Client
from serve import workers
from train.jobs import Job, job

SIZE = 4


class Stumbling(ASP):
    """A policy with a mistake in it."""

    def arrived(self, update: Update, now: float) -> Decisions:
        raise KeyError("a mistake")


class Cancelling(ASP):
    """Cancels and grants as it is told by what is measured. Workers 0 and 1 are applied in order."""

    def ready(self, worker: WorkerId, batch_size: int, now: float) -> Decisions:
        return [
            replace(decision, in_order=worker != 2) if isinstance(decision, Stream) else decision
            for decision in super().ready(worker, batch_size, now)
        ]

    def measured(self, kind: str, subject: object, value: float, now: float) -> Decisions:
        assert isinstance(subject, WorkerId)
        if kind == "grant":
            return [Grant(subject)]
        del self.promised[subject]
        return [Cancel(subject)]


DESCRIPTION = Description(Layout((Tensor("w", (SIZE,)),)), OptimizerSpec("SGD", ({"lr": 1.0},))).as_json()


class Worker:
    """A worker whose updates add a number to every weight."""

    def __init__(self, running: Job, number: int, description: bytes = DESCRIPTION) -> None:
        host, _, port = running.address.rpartition(":")
        self.client = Client((host, int(port)), description, worker=number)
        self.weights = np.zeros(SIZE, dtype=np.float32)

    def begin(self) -> None:
        self.client.begin(self.weights.data.cast("B"))

    def push(self, value: float) -> None:
        """Push an update, and do not wait for the Grant."""
        gradient = np.full(SIZE, -value, dtype=np.float32)

        def ready(iteration: int, version: int) -> GradientReady:
            return GradientReady(iteration, version, 1, 0.001, None)

        self.client._incarnation.answer(ready, gradient.data.cast("B"), self.weights.data.cast("B"), [1.0], "float32")

    def announce(self, and_push: bool) -> None:
        """Say that an update is there, and do not push it yet. and_push: push() follows, and says it again."""
        joins = self.client._incarnation
        ready = GradientReady(self.client.granted.iteration, joins.version, 1, 0.001, None)
        if and_push:
            joins._send([ready])
        else:
            joins._say(joins._state.tell_ready, ready)

    def go_on(self) -> float:
        self.client.go_on(self.weights.data.cast("B"))
        return float(self.weights[0])

    def die(self) -> None:
        self.client._incarnation.end(WireError("killed"))


def test_updates_that_look_the_same_are_told_apart() -> None:
    """A worker dies behind a barrier that holds its update, comes back, and gives the like again: both count."""
    with job("bsp", workers=2) as running:
        first, other = Worker(running, 0), Worker(running, 1)
        first.begin()
        other.begin()
        first.push(1.0)
        first.die()
        again = Worker(running, 0)
        again.begin()
        again.push(10.0)
        other.push(100.0)
        assert other.go_on() == again.go_on() == 111.0
        for worker in (again, other):
            worker.client.close()


def test_a_policy_that_hears_losses_is_told_the_momentum_before_anybody_joins(tmp_path: Path) -> None:
    """Also by a server that goes on from a checkpoint, before anybody has said again what is trained."""
    heavy = Description(Layout((Tensor("w", (SIZE,)),)), OptimizerSpec("SGD", ({"lr": 1.0, "momentum": 0.9},)))
    with job("rlp", saving=CheckpointPlan(tmp_path, updates=1)) as running:
        worker = Worker(running, 0, heavy.as_json())
        worker.begin()
        policy = running.coordinator.ledger.policy
        assert isinstance(policy, RLP)
        assert policy.sight.momentum == 0.9
        worker.push(1.0)
        worker.go_on()
        worker.client.close()
        running.finish()
    with job("rlp", restored=checkpoint.newest(tmp_path)) as running:
        policy = running.coordinator.ledger.policy
        assert isinstance(policy, RLP)
        assert policy.sight.momentum == 0.9


def test_a_mistake_ends_the_generation_and_does_not_hang_it() -> None:
    with job("serve.test_coordinator:Stumbling") as running:
        worker = Worker(running, 0)
        worker.begin()
        worker.push(1.0)
        end = time.monotonic() + 30.0
        while not running.coordinator.failed.is_set():
            assert time.monotonic() < end, "nobody noticed"
            time.sleep(0.01)
        assert "a mistake" in running.coordinator.reason
        worker.die()


def test_a_worker_started_again_behind_a_dead_link_is_let_in() -> None:
    """Its old self looks alive for a while, since its connection is open; but it does not beat."""
    with job("asp", lease=2.0) as running:
        old = Worker(running, 0)
        old.begin()
        old.client._incarnation._ending.over.set()  # it beats no more, and hangs up on nobody
        new = Worker(running, 0)
        new.begin()
        new.push(1.0)
        assert new.go_on() == 1.0
        new.client.close()
        old.die()


def test_one_that_is_alive_keeps_its_place() -> None:
    with job("asp", lease=2.0) as running:
        first = Worker(running, 0)
        first.begin()
        with pytest.raises(ConnectionError, match="it is alive"):
            Worker(running, 0)
        first.client.close()


def test_a_worker_without_a_number_that_restarts_takes_its_place_again() -> None:
    """It crashes, comes back within its lease, and nobody waits for its former self."""
    weights = memoryview(bytearray(workers.SIZE * 4))
    with job("asp", shards=1, workers=1) as running:
        first = Client(address(running.address), workers.described())
        first.begin(weights)
        first._incarnation.end(ConnectionError("dead"))  # as if the process had died: it does not come back by itself
        end = time.monotonic() + 30
        while running.coordinator.state.roster.training[0].connection is not None:  # a process takes longer to start
            assert time.monotonic() < end
            time.sleep(0.005)
        assert running.work(lambda where: workers.work(where, 20)) == [20.0]
        running.finish()
    assert first.worker == 0


def test_after_a_restoration_nobody_is_told_that_all_is_done_before_the_others_are_back(tmp_path: Path) -> None:
    """One is through with its loop and comes back first; the other, in a long batch, must not find the job over."""
    with job("asp", shards=2, workers=1, saving=CheckpointPlan(tmp_path, updates=1000)) as running:
        running.work(lambda where: workers.work(where, 40, updates=5))
        running.finish()
    found = checkpoint.read(tmp_path)  # of what there was when the server closed
    assert found.job["samples"]["trained"] == 20

    def through(where: str) -> float:
        weights = np.zeros(workers.SIZE, np.float32)
        client = Client(address(where), workers.described(), worker=0)
        client.begin(weights.data.cast("B"))
        client.finish(weights.data.cast("B"))
        client.close()
        return float(weights[0])

    def late(where: str) -> float:
        while not any(isinstance(event, Left) and event.worker == 0 for event in running.events):
            time.sleep(0.005)
        return workers.work(where, 40, worker=1)

    with job("asp", shards=2, workers=2, restored=found, awaited=frozenset({0, 1})) as running:
        assert running.work(through, late) == [40.0, 40.0], "the one that waited has the last model"
        running.finish()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30.0
    while not true():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.002)


def test_a_push_that_is_cancelled_while_it_is_put_off_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is due, and waits for worker 0's update; worker 1 is ready meanwhile, and cancelled."""
    monkeypatch.setattr("paceline.model.description.MIN_PIECE_ELEMENTS", 1)
    saving = CheckpointPlan(tmp_path, updates=1)
    with job("serve.test_coordinator:Cancelling", workers=3, streamed=True, saving=saving) as running:
        crew = [Worker(running, number) for number in range(3)]
        for worker in crew:
            worker.begin()
        slow, cancelled, quick = crew
        state = running.coordinator.state
        quiesce = state._quiesce
        until(lambda: any(tmp_path.glob("version-*0")) and not state.is_saving)
        slow.announce(and_push=True)
        until(lambda: bool(quiesce.under_way))
        quick.push(1.0)
        until(lambda: quiesce.is_awaited)
        cancelled.announce(and_push=False)
        until(lambda: bool(quiesce._put_off))
        cancelled.client.measured("cancel", 0.0)
        until(lambda: any(isinstance(event, Cancelled) for event in running.events))

        def push(_where: str) -> list[float]:
            seen = []
            for value in (10.0, 100.0):  # the second is behind what was cancelled
                slow.push(value)
                seen.append(slow.go_on())
            return seen

        assert running.work(push) == [[11.0, 111.0]]
        until(lambda: not quiesce.is_awaited and not quiesce.under_way)
        cancelled.client.measured("grant", 0.0)
        assert cancelled.go_on() == 111.0
        for worker in crew:
            worker.client.close()
        running.finish()
    assert checkpoint.read(tmp_path).version == 3
