"""Workers that make the next local steps while the exchange of the last round is on its way."""

from __future__ import annotations

import atexit
import copy
import threading
import time
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("msgspec")

import paceline
from paceline.observe.trace import Applied, Arrived
from paceline.serve.wire.frames import WireError
from paceline.serve.worker.client import Client
from paceline.train import backend, overlapped_rounds
from paceline.train.overlapped_rounds import OverlappedRoundsBackend
from train.generations import served
from train.jobs import job
from train.lessons import OPTIMIZERS, batches_of, data, model, steps_of, weights
from train.rounds import H, share_samples, train_and_be_given_up, worker_of

F = torch.nn.functional


def test_batches_are_read_while_the_exchange_thread_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has no Grant then."""
    seen: list[int | None] = []
    asked = threading.Event()
    exchange = backend.exchange

    def without_a_grant(client: Any, *arguments: Any) -> None:
        if not asked.is_set():
            granted, client._incarnation.granted = client._incarnation.granted, None
            asked.wait(10)
            client._incarnation.granted = granted
        exchange(client, *arguments)

    monkeypatch.setattr(overlapped_rounds, "exchange", without_a_grant)

    def run(address: str) -> None:
        mine = model()
        optimizer = OPTIMIZERS["sgd"](mine.parameters())
        with paceline.join(mine, optimizer, connect=address, local_steps=H, overlap=True) as session:
            for number, (x, y) in enumerate(batches_of(0, 2 * H)):
                if number == H:
                    seen.append(session._backend.granted_batch)
                    asked.set()
                F.cross_entropy(mine(x), y).backward()
                session.step(batch_size=4)

    with job("bsp:weights=mean") as running:
        running.work(run)
    assert seen == [None], "this policy leaves the batch to the worker"


def test_the_samples_end_after_the_exchange_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread and the exchange thread would otherwise both join again if the server is lost now."""
    order: list[str] = []
    ended = threading.Event()
    exchange = backend.exchange

    def slow(*arguments: Any) -> None:
        ended.wait(0.5)
        exchange(*arguments)
        order.append("exchanged")

    def end(self: Client, size: int) -> None:
        order.append("ended")
        ended.set()

    monkeypatch.setattr(overlapped_rounds, "exchange", slow)
    monkeypatch.setattr(Client, "end_samples", end)

    def run(address: str) -> None:
        mine = model()
        optimizer = OPTIMIZERS["sgd"](mine.parameters())
        with paceline.join(mine, optimizer, connect=address, local_steps=H, overlap=True) as session:
            for x, y in batches_of(0, H):
                F.cross_entropy(mine(x), y).backward()
                session.step(batch_size=4)
            session._backend.end_samples(96)

    with job("bsp:weights=mean") as running:
        running.work(run)
    assert order == ["exchanged", "ended"]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every reply be used at the end of the next round, as on a thin link."""
    monkeypatch.setattr(OverlappedRoundsBackend, "_after_step", lambda _: None)


@pytest.mark.parametrize("inner", OPTIMIZERS)
@pytest.mark.parametrize(("policy", "streamed"), [("bsp", False), ("r2sp", True), ("safa", False)])
def test_one_worker_trains_as_plain_torch_does(inner: str, policy: str, streamed: bool) -> None:
    """What comes back is what the worker has sent, so every step is made on the same weights."""
    batches, same = batches_of(0, 4 * H + 1), model()
    with job(policy, shards=2, streamed=streamed) as running:
        (found,) = running.work(worker_of([batches], inner, overlap=True))
    steps_of(same, OPTIMIZERS[inner](same.parameters()), batches)
    torch.testing.assert_close(found, weights(same), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("late")
def test_bsp_averages_rounds_while_the_next_ones_are_made() -> None:
    """Each worker adds its steps of the round under way to the average of the round before."""
    batches = [batches_of(worker, 4 * H) for worker in range(2)]
    with job("bsp:weights=mean", workers=2) as running:
        found = running.work(*(worker_of(batches, overlap=True) for _ in batches))
    shared = weights(model())
    workers = [model() for _ in batches]
    inners = [OPTIMIZERS["momentum"](worker.parameters()) for worker in workers]
    begun = [shared.clone() for _ in batches]  # where a worker's present round counts from
    average: Any = None  # of the round before
    pushed: list[Any] = []
    for start in range(0, 4 * H, H):
        for worker, optimizer, its in zip(workers, inners, batches, strict=True):
            steps_of(worker, optimizer, its[start : start + H])
        if average is not None:
            for number, worker in enumerate(workers):
                moved = weights(worker) - pushed[number]
                torch.nn.utils.vector_to_parameters(average + moved, worker.parameters())
                begun[number] = average
        pushed = [weights(worker) for worker in workers]
        differences = [now - before for now, before in zip(pushed, begun, strict=True)]
        shared = shared + (differences[0] + differences[1]) / 2
        average = shared
    for each in found:
        torch.testing.assert_close(each, shared, rtol=1e-4, atol=1e-5)


def test_the_worker_computes_while_its_exchange_is_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each exchange ends only after the worker has made a step of the next round."""
    stepped = [threading.Event() for _ in range(4)]
    waited: list[bool] = []
    exchange = backend.exchange

    def waits(*arguments: Any) -> None:
        exchange(*arguments)
        waited.append(stepped[len(waited)].wait(20.0))

    monkeypatch.setattr(overlapped_rounds, "exchange", waits)
    mine, batches = model(), batches_of(0, 3 * H + 1)

    def run(address: str) -> None:
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        with paceline.join(mine, optimizer, connect=address, local_steps=H, overlap=True) as session:
            for number, (x, y) in enumerate(batches):
                if number % H == 1:
                    stepped[number // H - 1].set()
                F.cross_entropy(mine(x), y).backward()
                session.step(batch_size=len(x))
            stepped[2].set()
            stepped[3].set()

    with job("bsp") as running:
        running.work(run)
    assert waited == [True] * 4


@pytest.mark.parametrize("policy", ["bsp", "asp", "ssp", "r2sp", "r2sp:groups=2", "ksync:k=2"])
@pytest.mark.parametrize("codec", ["", "int8"])
def test_every_sample_counts_once_an_epoch(policy: str, codec: str) -> None:
    running = share_samples(policy, codec, overlap=True)
    applied = sum(len(event.workers) for event in running.events if isinstance(event, Applied))
    arrived = [event for event in running.events if isinstance(event, Arrived)]
    assert max(event.batch_size for event in arrived) == 4 * H
    assert applied <= len(arrived)


@pytest.mark.parametrize("given_up_at", [1, 3, 4, 5, 6, 11])
@pytest.mark.parametrize("is_late", [False, True])
def test_every_sample_counts_once_if_the_worker_is_given_up(
    given_up_at: int, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drops its steps since the last exchange that counts. Their samples are handed out again, and no others."""
    if is_late:
        monkeypatch.setattr(OverlappedRoundsBackend, "_after_step", lambda _: None)
    running, _ = train_and_be_given_up(given_up_at, overlap=True)
    counted = [event.batch_size for event in running.events if isinstance(event, Arrived)]
    assert sum(counted) == 2 * 48


def test_a_worker_that_dies_loses_its_steps_since_its_last_exchange() -> None:
    x, y = data(96)
    dataset = torch.utils.data.TensorDataset(x, y)

    def run(address: str, dies_after: int = 10**9) -> None:
        mine = model()
        session = paceline.join(
            mine, torch.optim.SGD(mine.parameters(), lr=0.05), connect=address, local_steps=4, overlap=True
        )
        for steps, (inputs, targets) in enumerate(session.batches(dataset, batch_size=4, epochs=4), start=1):
            loss = F.cross_entropy(mine(inputs), targets)
            loss.backward()
            session.step(loss)
            if steps == dies_after:
                atexit.unregister(session.close)
                backend: Any = session._backend
                backend._receive()
                backend._client._incarnation.end(WireError("killed"))
                return
            time.sleep(0.05)  # the lost worker is given up while the other one still trains
        session.finish()
        session.close()

    with job("asp:weights=mean", workers=2, lease=0.5) as running:
        running.work(lambda address: run(address, dies_after=6), run)
        assert running.coordinator.samples is not None
        assert running.coordinator.samples.all_done
    applied = sum(len(event.workers) for event in running.events if isinstance(event, Applied))
    assert applied == 4 * 96 // 4 // 4, "four of the six steps of the lost worker count, and two are made again"


def test_a_failed_exchange_ends_the_loop_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise WireError("The server at 10.0.0.1:7000 cannot be reached.")

    monkeypatch.setattr(overlapped_rounds, "exchange", fails)
    with job("bsp") as running, pytest.raises(ConnectionError, match="cannot be reached"):
        running.work(worker_of([batches_of(0, 3 * H)], overlap=True))


def test_weights_that_are_loaded_later_are_those_of_the_job() -> None:
    """They are loaded while an exchange is on its way, and steps go on from them."""
    loaded = model()
    torch.nn.init.constant_(loaded[0].weight, 0.5)
    mine, batches = model(), batches_of(0, 3 * H)

    def run(address: str) -> None:
        optimizer = OPTIMIZERS["sgd"](mine.parameters())
        with paceline.join(mine, optimizer, connect=address, local_steps=H, overlap=True) as session:
            for number, (x, y) in enumerate(batches):
                if number == H + 1:
                    session.load(loaded.state_dict())
                F.cross_entropy(mine(x), y).backward()
                session.step(batch_size=len(x))

    with served("bsp:weights=mean") as running:
        running.work(run)
    same = copy.deepcopy(loaded)
    steps_of(same, OPTIMIZERS["sgd"](same.parameters()), batches[H + 1 :])
    torch.testing.assert_close(weights(mine), weights(same), rtol=1e-5, atol=1e-6)


def test_running_statistics_are_those_of_the_server() -> None:
    torch.manual_seed(0)
    mine = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.BatchNorm1d(12), torch.nn.Linear(12, 3))
    x, y = data(32)

    def run(address: str) -> None:
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.05)
        with paceline.join(mine, optimizer, connect=address, local_steps=2, overlap=True) as session:
            for _ in range(9):
                loss = F.cross_entropy(mine(x), y)
                loss.backward()
                session.step(loss, batch_size=32)

    with job("r2sp") as running:
        running.work(run)
    assert mine[1].running_var.min() > 0
    assert mine[1].running_mean.abs().max() > 0
    assert all(value.isfinite().all() for value in mine.state_dict().values())
