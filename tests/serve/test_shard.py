"""A shard whose coordinator and workers are played by the test: exactly once, and never half an update."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from paceline.model.description import Description
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.model.slice import MAX_ELEMENT
from paceline.serve.shard.shard import Shard
from paceline.serve.wire import handshake
from paceline.serve.wire.caller import Caller
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.frames import Channel, MessageDecoder
from paceline.serve.wire.messages import (
    Accepted,
    ApplyUpdates,
    Challenge,
    Expelled,
    Fence,
    Hello,
    Identity,
    InitialWeights,
    InitialWeightsFrom,
    InitialWeightsReceived,
    PeerRejected,
    Pull,
    Push,
    PushReceived,
    Refused,
    Register,
    Registered,
    Setup,
    ShardHeartbeat,
    Stop,
    UpdatedPiece,
    UpdateReceived,
    Weights,
)
from paceline.serve.wire.tokens import token_for

SIZE = 4_000_000  # elements: far more than the buffers of two sockets hold
SGD = OptimizerSpec("SGD", ({"lr": 1.0},))
FROM_SHARD = MessageDecoder(
    Challenge | Accepted | Refused | Expelled | InitialWeightsReceived | PushReceived | UpdatedPiece | Weights
)


class Worker:
    """The worker's end of a connection to the shard."""

    def __init__(self, port: int, number: int, incarnation: int = 1, size: int = SIZE) -> None:
        self.size = size
        sock = socket.create_connection(("127.0.0.1", port))
        sock.settimeout(20.0)
        self.channel = Channel(sock, FROM_SHARD)
        handshake.call(self.channel, token_for("worker", b"secret"))
        self.channel.send(Hello(number, incarnation, handshake.ticket(b"key", number, incarnation)))

    def push(self, iteration: int, value: Any) -> object:
        """Push a gradient, and return the shard's answer. value: of all elements, or an array of them."""
        gradient = np.full(self.size, value, dtype=np.float32)
        self.channel.send(Push(iteration, (1.0,)), gradient.data.cast("B"))
        return self.channel.receive()

    def weights(self) -> tuple[int, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
        """Receive the answer to a Pull. Return its version and its weights."""
        place = np.empty(self.size, dtype=np.float32)
        answer = self.channel.receive(lambda _message, _size: place.data.cast("B"))
        return answer.version, place

    def pull(
        self, version: int, expected: int | None = None
    ) -> tuple[int, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
        """Pull the model, and return its version and its weights."""
        self.channel.send(Pull(version, expected))
        return self.weights()


class Stage:
    """A shard, and the coordinator's end of its connection. The model begins with zeros, and SGD has a rate of 1."""

    def __init__(self, size: int = SIZE, optimizer: OptimizerSpec = SGD, **setup: Any) -> None:
        self.size, self.shards = size, list[Shard]()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            endpoint = Endpoint("127.0.0.1", listener.getsockname()[1], b"secret")

            def hold() -> None:
                self.shards.append(Shard(0, endpoint))
                self.shards[0].run()

            self.thread = threading.Thread(target=hold, daemon=True)
            self.thread.start()
            sock, _ = listener.accept()
        sock.setblocking(False)
        asyncio.run(Caller(sock).shake_hands(b"secret", "generation"))
        self.channel = Channel(
            sock,
            MessageDecoder(Register | UpdateReceived | InitialWeightsReceived | PeerRejected | ShardHeartbeat),
        )
        self.sending, self.closed = threading.Lock(), threading.Event()
        self.port = self.hears().port
        self.orders(Registered(0))
        threading.Thread(target=self._beat, daemon=True).start()
        layout = Layout((Tensor("w", (size,), "float32", 0),))
        described = Description(layout, optimizer).as_json()
        pieces = setup.pop("pieces", ((0, size),))
        self.orders(Setup(pieces, key=b"key", **setup), memoryview(described))
        first = Worker(self.port, 0, size=size)
        self.orders(InitialWeightsFrom(0, 1))
        for piece, (start, stop) in enumerate(pieces):
            first.channel.send(InitialWeights(piece), np.zeros(stop - start, dtype=np.float32).data.cast("B"))
            assert first.channel.receive() == InitialWeightsReceived(0, 1)
        assert self.hears() == InitialWeightsReceived(0, 1)
        self.workers = [first]

    def orders(self, message: Any, body: memoryview | None = None) -> None:
        """Send an order to the shard."""
        with self.sending:
            self.channel.send(message, body)

    def _beat(self) -> None:
        """Send heartbeats, without which the shard would look for a new connection."""
        while not self.closed.wait(1.0):
            with contextlib.suppress(OSError):
                self.orders(ShardHeartbeat(0))

    def hears(self) -> Any:
        """Return the shard's next message to the coordinator, except heartbeats."""
        while isinstance(message := self.channel.receive(), ShardHeartbeat):
            pass
        return message

    def worker(self, number: int, incarnation: int = 1) -> Worker:
        """Connect a worker to the shard."""
        self.workers.append(Worker(self.port, number, incarnation, self.size))
        return self.workers[-1]

    def close(self) -> None:
        self.orders(Stop())
        self.closed.set()
        self.thread.join(20.0)
        for worker in self.workers:
            worker.channel.close()
        self.channel.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def test_an_update_sent_twice_is_applied_once(stage: Stage) -> None:
    worker, update = stage.worker(1), Identity(1, 1, 1)
    assert worker.push(1, 0.5) == PushReceived(1)
    assert stage.hears() == UpdateReceived(update)
    again = stage.worker(1)  # the answer was lost, so the worker pushes again over a new connection
    assert again.push(1, 0.5) == PushReceived(1)
    stage.orders(ApplyUpdates(1, (update,), (1.0,), None))
    version, weights = worker.pull(1)
    assert version == 1
    assert np.all(weights == -0.5)
    assert again.push(2, 0.5) == PushReceived(2)
    assert stage.hears() == UpdateReceived(Identity(1, 1, 2)), "the repeated push must not be reported again"


def test_a_slow_reader_sees_one_version_and_delays_nobody(stage: Stage) -> None:
    slow, quick = stage.worker(1), stage.worker(2)
    slow.channel.send(Pull(0))  # its answer is not read yet
    for version in (1, 2):
        assert quick.push(version, 1.0) == PushReceived(version)
        stage.hears()
        stage.orders(ApplyUpdates(version, (Identity(2, 1, version),), (1.0,), None))
        newest, weights = quick.pull(version)
        assert newest == version
        assert np.all(weights == -version)
    version, weights = slow.weights()
    assert np.all(weights == -version), "the pull holds half an update"


def test_an_older_incarnation_is_fenced_off(stage: Stage) -> None:
    old = stage.worker(1, incarnation=1)
    stage.orders(Fence(1, 2))
    new = stage.worker(1, incarnation=2)
    assert new.push(1, 1.0) == PushReceived(1)
    assert stage.hears() == UpdateReceived(Identity(1, 2, 1))
    stage.orders(ApplyUpdates(1, (Identity(1, 2, 1),), (1.0,), None))
    assert new.pull(1)[0] == 1  # orders are carried out in sequence, so the Fence was too
    with pytest.raises(OSError):  # its connection was cut
        old.push(1, 1.0)
    again = stage.worker(1, incarnation=1)  # a new connection is refused
    assert isinstance(again.channel.receive(), Expelled)


@pytest.mark.parametrize("at", [0, SIZE // 2 + 1, SIZE - 1])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_single_nan_or_infinity_is_found_at_any_position(stage: Stage, at: int, bad: float) -> None:
    gradient = np.zeros(SIZE, dtype=np.float32)
    gradient[at] = bad
    worker = stage.worker(1)
    worker.channel.send(Push(1, (1.0,)), gradient.data.cast("B"))
    assert "NaN or infinity" in worker.channel.receive().reason


def test_large_finite_numbers_are_accepted(stage: Stage) -> None:
    """The sum of their squares overflows to infinity, but each is within the limit."""
    assert stage.worker(1).push(1, MAX_ELEMENT) == PushReceived(1)


def test_a_gradient_of_nan_does_not_change_the_model(stage: Stage) -> None:
    bad, good = stage.worker(1), stage.worker(2)
    assert "NaN" in bad.push(1, float("nan")).reason  # type: ignore[attr-defined]
    assert "NaN" in stage.hears().reason, "the coordinator counts it"
    assert good.push(1, 1.0) == PushReceived(1)
    assert stage.hears() == UpdateReceived(Identity(2, 1, 1))
    stage.orders(ApplyUpdates(1, (Identity(2, 1, 1),), (1.0,), None))
    assert np.all(good.pull(1)[1] == -1.0)


def test_initial_weights_are_taken_once_from_the_named_worker(stage: Stage) -> None:
    ones = np.ones(SIZE, dtype=np.float32).data.cast("B")
    again = stage.worker(0)  # the answer was lost, so the worker sends them again
    again.channel.send(InitialWeights(), ones)
    assert again.channel.receive() == InitialWeightsReceived(0, 1)
    assert np.all(again.pull(0)[1] == 0.0)
    stage.orders(Fence(0, 2))  # the worker is given up, and another one is named
    stage.orders(InitialWeightsFrom(1, 1))
    other = stage.worker(1)
    other.channel.send(InitialWeights(), ones)
    assert other.channel.receive() == stage.hears() == InitialWeightsReceived(1, 1)
    assert np.all(other.pull(0)[1] == 1.0)
    late = stage.worker(0, incarnation=1)
    assert isinstance(late.channel.receive(), Expelled)


def test_initial_weights_from_another_worker_are_refused(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.serve.shard.shard.NAMING_SECONDS", 0.1)
    stranger = stage.worker(7)
    stranger.channel.send(InitialWeights(), np.ones(SIZE, dtype=np.float32).data.cast("B"))
    assert "not asked" in stranger.channel.receive().reason
    assert "not asked" in stage.hears().reason
    assert np.all(stage.worker(8).pull(0)[1] == 0.0)
