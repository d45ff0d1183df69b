"""A shard between a coordinator and workers played by the test: exactly once, and never half an update."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from paceline.model import slice as slices
from paceline.model.layout import Layout, Tensor
from paceline.model.slice import Slice
from paceline.model.spec import OptimizerSpec
from paceline.serve import greeting
from paceline.serve.description import Description
from paceline.serve.messages import (
    Accepted,
    Apply,
    Arrived,
    Begin,
    Begun,
    Challenge,
    Fence,
    Hello,
    Identity,
    Proof,
    Pull,
    Push,
    Pushed,
    Refused,
    Register,
    Setup,
    Stop,
    Weights,
)
from paceline.serve.shard import Shard
from paceline.serve.wire import Channel, Reader

SIZE = 4_000_000  # elements: far more than two sockets' buffers hold
FROM_SHARD = Reader(Challenge | Accepted | Refused | Pushed | Weights)


class Worker:
    """A worker's end of a connection to the shard."""

    def __init__(self, port: int, number: int, incarnation: int = 1) -> None:
        sock = socket.create_connection(("127.0.0.1", port))
        sock.settimeout(20.0)
        self.channel = Channel(sock, FROM_SHARD)
        greeting.call(self.channel, b"secret")
        self.channel.send(Hello(number, incarnation))

    def push(self, iteration: int, value: float) -> object:
        gradient = np.full(SIZE, value, dtype=np.float32)
        self.channel.send(Push(iteration, (1.0,)), gradient.data.cast("B"))
        return self.channel.receive()

    def weights(self) -> tuple[int, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
        """The answer to a Pull that was sent."""
        place = np.empty(SIZE, dtype=np.float32)
        answer = self.channel.receive(lambda _message, _size: place.data.cast("B"))
        return answer.version, place

    def pull(self, version: int) -> tuple[int, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
        self.channel.send(Pull(version))
        return self.weights()


class Stage:
    """A shard with a model of zeros, plain SGD with a rate of 1, and the coordinator's end of its connection."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            shard = threading.Thread(target=lambda: Shard(0, listener.getsockname()[:2], b"secret").run(), daemon=True)
            shard.start()
            sock, _ = listener.accept()
        sock.settimeout(20.0)
        self.thread = shard
        self.coordinator = Channel(sock, Reader(Proof | Register | Arrived | Begun))
        greeting.listen(self.coordinator, b"secret", "generation")
        self.port = self.coordinator.receive().port
        layout = Layout((Tensor("w", (SIZE,), "float32", 0),))
        described = Description(layout, OptimizerSpec("SGD", ({"lr": 1.0},))).as_json()
        self.coordinator.send(Setup(0, SIZE), memoryview(described))
        first = Worker(self.port, 0)
        first.channel.send(Begin(), np.zeros(SIZE, dtype=np.float32).data.cast("B"))
        assert self.coordinator.receive() == Begun()
        self.workers = [first]

    def worker(self, number: int, incarnation: int = 1) -> Worker:
        self.workers.append(Worker(self.port, number, incarnation))
        return self.workers[-1]

    def close(self) -> None:
        self.coordinator.send(Stop())
        self.thread.join(20.0)
        for worker in self.workers:
            worker.channel.close()
        self.coordinator.close()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(slices, "STRETCH", SIZE // 3)  # so that a step is made in several
    stage = Stage()
    yield stage
    stage.close()


def test_an_update_sent_twice_is_applied_once(stage: Stage) -> None:
    worker, update = stage.worker(1), Identity(1, 1, 1)
    assert worker.push(1, 0.5) == Pushed(1)
    assert stage.coordinator.receive() == Arrived(update)
    again = stage.worker(1)  # the answer was lost, and it comes over another connection
    assert again.push(1, 0.5) == Pushed(1)
    stage.coordinator.send(Apply(1, (update,), (1.0,), None))
    version, weights = worker.pull(1)
    assert version == 1
    assert np.all(weights == -0.5)
    assert again.push(2, 0.5) == Pushed(2)
    assert stage.coordinator.receive() == Arrived(Identity(1, 1, 2)), "the repeated push was not reported again"


def test_a_slow_reader_sees_one_version_and_delays_nobody(stage: Stage) -> None:
    slow, quick = stage.worker(1), stage.worker(2)
    slow.channel.send(Pull(0))  # and does not read the answer yet
    for version in (1, 2):
        assert quick.push(version, 1.0) == Pushed(version)
        stage.coordinator.receive()
        stage.coordinator.send(Apply(version, (Identity(2, 1, version),), (1.0,), None))
        newest, weights = quick.pull(version)
        assert newest == version
        assert np.all(weights == -version)
    version, weights = slow.weights()
    assert np.all(weights == -version), "half of an update was seen"


def test_a_worker_that_was_given_up_is_fenced_off(stage: Stage) -> None:
    old = stage.worker(1, incarnation=1)
    stage.coordinator.send(Fence(1, 2))
    new = stage.worker(1, incarnation=2)
    assert new.push(1, 1.0) == Pushed(1)
    assert stage.coordinator.receive() == Arrived(Identity(1, 2, 1))
    stage.coordinator.send(Apply(1, (Identity(1, 2, 1),), (1.0,), None))
    assert new.pull(1)[0] == 1  # orders are carried out one after the other, so the fence is up
    assert "given up" in old.push(1, 1.0).reason  # type: ignore[attr-defined]


def test_a_gradient_that_is_not_a_number_touches_nothing(stage: Stage) -> None:
    bad, good = stage.worker(1), stage.worker(2)
    assert "NaN" in bad.push(1, float("nan")).reason  # type: ignore[attr-defined]
    assert good.push(1, 1.0) == Pushed(1)
    assert stage.coordinator.receive() == Arrived(Identity(2, 1, 1))
    stage.coordinator.send(Apply(1, (Identity(2, 1, 1),), (1.0,), None))
    assert np.all(good.pull(1)[1] == -1.0)


def test_a_pull_in_the_midst_of_an_update_waits_for_the_rest_of_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights go out while the update is still being applied, but only those that have it."""
    begun, go_on = threading.Event(), threading.Event()
    steps = Slice.steps

    def with_a_pause(*arguments: Any) -> Iterator[int]:
        for done in steps(*arguments):
            yield done
            begun.set()
            assert go_on.wait(20.0)

    monkeypatch.setattr(Slice, "steps", with_a_pause)
    pusher, early = stage.worker(1), stage.worker(2)
    assert pusher.push(1, 1.0) == Pushed(1)
    stage.coordinator.receive()
    stage.coordinator.send(Apply(1, (Identity(1, 1, 1),), (1.0,), None))
    assert begun.wait(20.0)
    early.channel.send(Pull(0))
    place = np.empty(SIZE, dtype=np.float32)

    def body(_message: object, _size: int) -> memoryview:
        go_on.set()  # the answer has begun while the update had not ended
        return place.data.cast("B")

    assert early.channel.receive(body).version == 1
    assert np.all(place == -1.0)
