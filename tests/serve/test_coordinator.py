"""The coordinator keeps its state right while workers join, die and come back."""

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
from paceline.serve.worker.gradient import OutgoingGradient
from serve import workers
from train.jobs import Job, job

SIZE = 4


class Buggy(ASP):
    """A policy with a bug."""

    def arrived(self, update: Update, now: float) -> Decisions:
        raise KeyError("a bug")


class Cancelling(ASP):
    """A policy that cancels or grants a worker when it reports a metric. Workers 0 and 1 are applied in order."""

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
        elements = np.full(SIZE, -value, dtype=np.float32)
        gradient = OutgoingGradient(elements.data.cast("B"), (1.0,), "float32", batch_size=1, compute_seconds=0.001)
        self.client._incarnation.push(gradient, self.weights.data.cast("B"))

    def announce(self, and_push: bool) -> None:
        """Send GradientReady without a push. and_push: push() follows, and sends it again."""
        incarnation = self.client._incarnation
        ready = GradientReady(self.client.granted.iteration, incarnation.version, 1, 0.001, None)
        if and_push:
            incarnation._send([ready])
        else:
            incarnation._say(incarnation._state.announce_ready, ready)

    def go_on(self) -> float:
        """Wait for the next grant and pull the model. Return its first weight."""
        self.client.go_on(self.weights.data.cast("B"))
        return float(self.weights[0])

    def die(self) -> None:
        """Drop all connections without leaving the job, as a killed process does."""
        self.client._incarnation.end(WireError("killed"))


def test_updates_of_two_incarnations_are_told_apart() -> None:
    """A worker dies while a barrier holds its update, comes back, and pushes the same iteration again. Both count."""
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


def test_a_policy_that_uses_losses_knows_the_momentum_before_a_worker_joins(tmp_path: Path) -> None:
    """A server that resumes from a checkpoint knows it too, before a worker has described the model again."""
    description = Description(Layout((Tensor("w", (SIZE,)),)), OptimizerSpec("SGD", ({"lr": 1.0, "momentum": 0.9},)))
    with job("rlp", saving=CheckpointPlan(tmp_path, updates=1)) as running:
        worker = Worker(running, 0, description.as_json())
        worker.begin()
        policy = running.coordinator.ledger.policy
        assert isinstance(policy, RLP)
        assert policy.cluster_state.momentum == 0.9
        worker.push(1.0)
        worker.go_on()
        worker.client.close()
        running.finish()
    with job("rlp", restored=checkpoint.newest(tmp_path)) as running:
        policy = running.coordinator.ledger.policy
        assert isinstance(policy, RLP)
        assert policy.cluster_state.momentum == 0.9


def test_a_bug_in_a_policy_ends_the_generation() -> None:
    with job("serve.test_coordinator:Buggy") as running:
        worker = Worker(running, 0)
        worker.begin()
        worker.push(1.0)
        end = time.monotonic() + 30.0
        while not running.coordinator.failed.is_set():
            assert time.monotonic() < end, "the generation goes on"
            time.sleep(0.01)
        assert "a bug" in running.coordinator.reason
        worker.die()


def test_a_restarted_worker_replaces_its_silent_incarnation() -> None:
    """The old incarnation looks alive for a while, because its connection is open. But it sends no heartbeat."""
    with job("asp", lease=2.0) as running:
        old = Worker(running, 0)
        old.begin()
        old.client._incarnation._ending.over.set()  # it sends no more heartbeats, but keeps its connections
        new = Worker(running, 0)
        new.begin()
        new.push(1.0)
        assert new.go_on() == 1.0
        new.client.close()
        old.die()


def test_a_live_worker_keeps_its_number() -> None:
    with job("asp", lease=2.0) as running:
        first = Worker(running, 0)
        first.begin()
        with pytest.raises(ConnectionError, match="it is alive"):
            Worker(running, 0)
        first.client.close()


def test_a_restarted_worker_without_a_number_gets_its_old_number() -> None:
    """It crashes and comes back within its lease. The job does not wait for the old incarnation."""
    weights = memoryview(bytearray(workers.SIZE * 4))
    with job("asp", shards=1, workers=1) as running:
        first = Client(address(running.address), workers.described())
        first.begin(weights)
        first._incarnation.end(ConnectionError("dead"))  # as if the process had died
        # A restarted process takes longer to start than the coordinator needs to notice the lost connection.
        wait_until(lambda: running.coordinator.state.roster.training[0].connection is None)
        assert running.work(lambda where: workers.work(where, 20)) == [20.0]
        running.finish()
    assert first.worker == 0


def test_after_a_restart_the_job_waits_for_all_workers_before_it_finishes(tmp_path: Path) -> None:
    """One worker has finished its loop and comes back first. The other, in a long batch, must still train."""
    with job("asp", shards=2, workers=1, saving=CheckpointPlan(tmp_path, updates=1000)) as running:
        running.work(lambda where: workers.work(where, 40, updates=5))
        running.finish()
    found = checkpoint.read(tmp_path)  # of the state when the server closed
    assert found.job["samples"]["trained"] == 20

    def finished(where: str) -> float:
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
        assert running.work(finished, late) == [40.0, 40.0], "the worker that waited has the last model"
        running.finish()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.002)


def test_a_push_that_is_cancelled_while_it_is_deferred_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is due, and waits for worker 0's update. Meanwhile worker 1 becomes ready and is cancelled."""
    monkeypatch.setattr("paceline.model.description.MIN_PIECE_ELEMENTS", 1)
    saving = CheckpointPlan(tmp_path, updates=1)
    with job("serve.test_coordinator:Cancelling", workers=3, streamed=True, saving=saving) as running:
        members = [Worker(running, number) for number in range(3)]
        for worker in members:
            worker.begin()
        slow, cancelled, quick = members
        state = running.coordinator.state
        quiesce = state._quiesce
        wait_until(lambda: any(tmp_path.glob("version-*0")) and not state.is_saving)
        slow.announce(and_push=True)
        wait_until(lambda: bool(quiesce.under_way))
        quick.push(1.0)
        wait_until(lambda: quiesce.is_awaited)
        cancelled.announce(and_push=False)
        wait_until(lambda: bool(quiesce._postponed))
        cancelled.client.measured("cancel", 0.0)
        wait_until(lambda: any(isinstance(event, Cancelled) for event in running.events))

        def push(_where: str) -> list[float]:
            seen = []
            for value in (10.0, 100.0):  # the second comes after the cancelled update in the order
                slow.push(value)
                seen.append(slow.go_on())
            return seen

        assert running.work(push) == [[11.0, 111.0]]
        wait_until(lambda: not quiesce.is_awaited and not quiesce.under_way)
        cancelled.client.measured("grant", 0.0)
        assert cancelled.go_on() == 111.0
        for worker in members:
            worker.client.close()
        running.finish()
    assert checkpoint.read(tmp_path).version == 3
