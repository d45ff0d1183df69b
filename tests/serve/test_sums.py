"""Running sums: updates that are added up as they arrive give the same model, and take less memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from paceline.job.clipping import Factors
from paceline.model import checkpoint
from paceline.model.layout import STATISTICS, Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.model.slice import Slice
from paceline.observe.trace import Arrived
from paceline.serve import replay
from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan
from paceline.serve.environment import address
from paceline.serve.shard.store import HeldUpdate, WholeStore
from paceline.serve.wire.messages import AddToSum, ApplyUpdates, DropUpdate, Identity
from paceline.serve.worker.client import Client
from paceline.serve.worker.gradient import OutgoingGradient
from serve.workers import described
from train.jobs import job

SIZE, WORKERS, ROUNDS = 1000, 6, 5


def new_store() -> WholeStore:
    layout = Layout((Tensor("w", (4,)),))
    return WholeStore(Slice(layout, 0, 4, OptimizerSpec("SGD", ({"lr": 1.0},))))


def put(store: WholeStore, worker: int, value: float, iteration: int = 1, rate: float = 1.0) -> Identity:
    """Put an update into the store whose elements all have this value."""
    update = Identity(worker, 1, iteration)
    buffer = store.take_buffer()
    buffer.fill_(value)
    assert store.put(update, HeldUpdate(buffer, (rate,)))
    return update


@pytest.mark.parametrize("added", [False, True])
def test_each_update_counts_with_its_own_rate_and_its_own_clips(added: bool) -> None:
    store = new_store()
    updates = tuple(put(store, worker, 2.0 + worker, rate=rate) for worker, rate in enumerate((1.0, 0.25)))
    clips = (Factors(0.5, 1.0), Factors(1.0, 0.1))
    for update, clip in zip(updates, clips, strict=True):
        if added:
            store.carry_out(AddToSum(update, 0, 10.0, clip))
    sums = ((0, 0.1),) if added else ()
    store.apply(ApplyUpdates(1, updates, (1.0, 1.0), None, sums=sums, clips=() if added else clips))
    expected = 1.0 * 0.5 * 2.0 + 0.25 * 0.1 * 3.0  # rate · clip · gradient
    assert torch.allclose(store.slice.weights, torch.full((4,), -expected))


def test_a_sum_is_applied_as_its_updates_would_be() -> None:
    store = new_store()
    updates = [put(store, worker, worker + 1.0) for worker in range(3)]
    for update, weight in zip(updates, (10.0, 20.0, 30.0), strict=True):
        store.carry_out(AddToSum(update, 7, weight))
    order = ApplyUpdates(1, tuple(updates), (1 / 6, 2 / 6, 3 / 6), None, sums=((7, 1 / 60),))
    store.apply(order)
    store.applied(order)
    assert torch.allclose(store.slice.weights, torch.full((4,), -(1 / 6 + 4 / 6 + 9 / 6)))
    assert len(store._spare[0]) == 3 and not store._sums and not store._sum_of


@pytest.mark.parametrize("weights", [(1 / 6, 2 / 6, 3 / 6), (1 / 48, 2 / 48, 3 / 48), (1.0, 2.0, 3.0)])
def test_running_statistics_of_a_sum_are_averaged_as_those_of_its_updates(weights: tuple[float, ...]) -> None:
    """Statistics are values, not changes. So the weights of the updates count, and not the factor of the sum."""
    layout = Layout((Tensor("w", (2,)), Tensor("mean", (2,), group=STATISTICS)))
    both = [WholeStore(Slice(layout, 0, 4, OptimizerSpec("SGD", ({"lr": 1.0},)))) for _ in range(2)]
    for store, added in zip(both, (False, True), strict=True):
        store.slice.weights.copy_(torch.tensor([1.0, 2.0, 10.0, 20.0]))
        updates = tuple(put(store, worker, worker + 4.0) for worker in range(3))
        for update, raw in zip(updates, (10.0, 20.0, 30.0), strict=True):
            if added:
                store.carry_out(AddToSum(update, 0, raw))
        order = ApplyUpdates(1, updates, weights, None, sums=((0, weights[0] / 10),) if added else ())
        store.apply(order)
    held, summed = (store.slice.weights for store in both)
    assert torch.allclose(held, summed)
    assert float(held[2]) != 10.0


def test_a_sum_of_many_updates_takes_one_buffer() -> None:
    store = new_store()
    updates = []
    for worker in range(50):
        updates.append(put(store, worker, 1.0))
        store.carry_out(AddToSum(updates[-1], 0, 1.0))
        assert len(store._spare[0]) <= 1  # besides the buffer of the sum
    order = ApplyUpdates(1, tuple(updates), (0.5,) * 50, 0.25, sums=((0, 0.5),))
    store.slice.weights.fill_(8.0)
    store.apply(order)
    store.applied(order)
    assert torch.allclose(store.slice.weights, torch.full((4,), 0.75 * 8 + 0.25 * 25.0))
    assert len(store._spare[0]) == 2


def test_a_sum_whose_updates_are_all_dropped_is_forgotten() -> None:
    store = new_store()
    for update in [put(store, worker, 5.0) for worker in range(3)]:
        store.carry_out(AddToSum(update, 3, 1.0))
    for worker in range(3):
        store.carry_out(DropUpdate(Identity(worker, 1, 1)))
    assert not store._sums and not store._sum_of
    again = put(store, 0, 1.0, iteration=2)
    store.carry_out(AddToSum(again, 3, 2.0))
    order = ApplyUpdates(1, (again,), (1.0,), None, sums=((3, 0.5),))
    store.apply(order)
    assert torch.allclose(store.slice.weights, torch.full((4,), -1.0))


def trained(policy: str, folder: Path, **more: Any) -> np.ndarray[Any, Any]:
    """Train a model on two real shards, and return its last weights."""
    gradients = np.random.default_rng(0).normal(size=(WORKERS, SIZE)).astype(np.float32)

    def run(where: str, worker: int) -> None:
        weights = np.zeros(SIZE, np.float32)
        client = Client(address(where), described(SIZE), worker=worker)
        client.begin(weights.data.cast("B"))
        for _ in range(ROUNDS):
            client.exchange(
                (gradients[worker] + 0.1 * weights).data.cast("B"),
                weights.data.cast("B"),
                batch_size=worker + 1,
                compute_seconds=0.0,
                rates=(1.0,),
            )
        client.close()

    with job(policy, shards=2, workers=WORKERS, saving=CheckpointPlan(folder, updates=1000), **more) as running:
        running.work(*[lambda where, worker=worker: run(where, worker) for worker in range(WORKERS)])
        running.finish()
    found = checkpoint.newest(folder)
    assert found is not None and found.version == ROUNDS
    return np.concatenate([array.reshape(-1) for array in checkpoint.weights(found).values()])


@pytest.mark.parametrize("weights", ["sum", "mean", "equal"])
def test_running_sums_give_the_same_model_on_real_shards(weights: str, tmp_path: Path) -> None:
    held = trained(f"bsp:weights={weights}", tmp_path / "held")
    added = trained(f"bsp:weights={weights},running=true", tmp_path / "added")
    assert np.allclose(held, added, rtol=1e-4, atol=1e-5)
    assert np.abs(held).max() > 0.1


def test_a_recording_with_running_sums_can_be_replayed(tmp_path: Path) -> None:
    trained("bsp:running=true", tmp_path / "kept", record=tmp_path / "recorded")
    parts = replay.weights(tmp_path / "recorded")
    assert len(parts) == 2
    assert all(part.whole and part.same and part.updates == WORKERS * ROUNDS for part in parts)


def test_two_incarnations_of_a_worker_may_push_updates_of_the_same_number(tmp_path: Path) -> None:
    """A worker pushes, dies, joins again and pushes once more in the same round. Both updates count."""

    def push(where: str, value: float) -> Client:
        """Push an update, and do not wait for the Grant."""
        weights, gradient = np.zeros(SIZE, np.float32), np.full(SIZE, value, np.float32)
        client = Client(address(where), described(SIZE), worker=0)
        client.begin(weights.data.cast("B"))
        outgoing = OutgoingGradient(gradient.data.cast("B"), (1.0,), "float32", batch_size=1)
        client._incarnation.push(outgoing, weights.data.cast("B"))
        return client

    with job("bsp:running=true", shards=1, workers=2, saving=CheckpointPlan(tmp_path, updates=1), lease=1.0) as running:

        def arrived() -> int:
            return sum(isinstance(event, Arrived) for event in running.events)

        def twice(where: str) -> None:
            first = push(where, 1.0)
            wait_for(lambda: arrived() == 1)
            first._incarnation.end(ConnectionError("the plug was pulled"))
            second = push(where, 10.0)
            wait_for(lambda: arrived() == 2)
            ready.set()
            second.go_on(memoryview(bytearray(4 * SIZE)))
            second.close()

        def once(where: str) -> None:
            client = Client(address(where), described(SIZE), worker=1)
            weights, gradient = np.zeros(SIZE, np.float32), np.full(SIZE, 100.0, np.float32)
            client.begin(weights.data.cast("B"))
            assert ready.wait(30)
            client.exchange(gradient.data.cast("B"), weights.data.cast("B"), batch_size=1, rates=(1.0,))
            client.close()

        ready = threading.Event()
        running.work(twice, once)
        running.finish()
    arrivals = [(event.worker, event.iteration) for event in running.events if isinstance(event, Arrived)]
    assert sorted(arrivals) == [(0, 1), (0, 1), (1, 1)]
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert all(np.allclose(weights, -111.0) for weights in checkpoint.weights(found).values())


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
