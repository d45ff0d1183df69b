"""Hostile and broken peers attack a running job. Each gets a clear error or is dropped, and no other peer is affected.

Two honest workers train all the while. Each of their updates adds one to every weight. After each attack they must
continue, and at the end every weight must equal the number of their updates.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
msgspec = pytest.importorskip("msgspec")

from paceline.job.saving import MAX_STALENESS
from paceline.model.description import Description
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.serve.wire import async_channel, handshake, messages
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.frames import MAGIC, PREFIX, VERSION, Channel, MessageDecoder, encode
from paceline.serve.wire.messages import (
    ApplyUpdates,
    Expelled,
    GradientReady,
    GrantIteration,
    Hello,
    Identity,
    InitialWeights,
    Join,
    Leave,
    Message,
    Proof,
    ProvideWeights,
    Pull,
    Push,
    PushReceived,
    Refused,
    Register,
    RequestSamples,
    Resume,
    SampleRange,
    SavePart,
    Setup,
    Welcome,
)
from paceline.serve.wire.tokens import token_for
from paceline.serve.worker.client import Client
from train.jobs import Job, job

SIZE = 64
TOKEN, SHARD_TOKEN = b"secret", b"the shards' own"
DESCRIPTION = Description(Layout((Tensor("w", (SIZE,)),)), OptimizerSpec("SGD", ({"lr": 1.0},))).as_json()
ANY_MESSAGE = MessageDecoder(functools.reduce(operator.or_, Message.__subclasses__()))
PATIENCE = 30.0


class HonestWorkers:
    """Two workers that train until `stop` is set."""

    def __init__(self, running: Job) -> None:
        self.host, _, port = running.address.rpartition(":")
        self.port = int(port)
        self.updates = [0, 0]
        self.errors: list[BaseException] = []
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self._work, args=(number,), daemon=True) for number in (0, 1)]
        for thread in self.threads:
            thread.start()

    def client(self, number: int) -> Client:
        return Client((self.host, self.port), DESCRIPTION, TOKEN, number)

    def _work(self, number: int) -> None:
        try:
            client = self.client(number)
            weights = np.zeros(SIZE, dtype=np.float32)
            gradient = np.full(SIZE, -1.0, dtype=np.float32)
            client.begin(weights.data.cast("B"))
            while not self.stop.is_set():
                given = client.take(1, 1000, 10**6)
                client.exchange(
                    gradient.data.cast("B"),
                    weights.data.cast("B"),
                    batch_size=1,
                    compute_seconds=0.01,
                    rates=[1.0],
                    taken=[given.number],
                )
                self.updates[number] += 1
                time.sleep(0.002)  # leave the processor to the attackers
            client.close()
        except BaseException as error:
            self.errors.append(error)

    def assert_progress(self) -> None:
        """Wait until both workers have made two more updates."""
        wanted = [count + 2 for count in self.updates]
        end = time.monotonic() + PATIENCE
        while any(count < want for count, want in zip(self.updates, wanted, strict=True)):
            assert not self.errors, self.errors
            assert time.monotonic() < end, "the honest workers make no progress"
            time.sleep(0.005)


class Target:
    """The job that is attacked."""

    def __init__(self, running: Job, honest: HonestWorkers) -> None:
        self.running, self.honest = running, honest
        self.coordinator = honest.port
        self.sockets: list[socket.socket] = []  # opened by a test, and closed after it
        self.shards = [port for _, port in running.coordinator.shards.addresses]

    def socket(self, port: int) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", port))
        sock.settimeout(PATIENCE)
        self.sockets.append(sock)
        return sock

    def connect(self, port: int, token: bytes = TOKEN) -> Channel:
        """Connect to a port and shake hands."""
        sock = self.socket(port)
        channel = Channel(sock, ANY_MESSAGE)
        sock.settimeout(PATIENCE)
        channel.limit_silence(PATIENCE)
        handshake.call(channel, token_for("worker", token) if port in self.shards else token)
        return channel

    def join_job(self, number: int = 7) -> tuple[Channel, Welcome]:
        """Join the job at the coordinator."""
        channel = self.connect(self.coordinator)
        channel.send(Join(number), memoryview(DESCRIPTION))
        return channel, receive_until(channel, Welcome)

    def member(self, number: int = 7) -> tuple[Channel, Welcome, GrantIteration]:
        """Join the job at the coordinator, and wait for the first grant."""
        channel, welcome = self.join_job(number)
        return channel, welcome, receive_until(channel, GrantIteration)

    def at_shard(self, welcome: Welcome, shard: int = 0) -> Channel:
        """Connect to a shard as the worker of this Welcome."""
        channel = self.connect(self.shards[shard])
        channel.send(Hello(welcome.worker, welcome.incarnation, welcome.ticket))
        return channel


def receive_until(channel: Channel, kind: type) -> Any:
    """Receive messages up to the first of this kind, and return that one."""
    while not isinstance(message := channel.receive(), kind):
        assert not isinstance(message, Refused | Expelled), message
    return message


def assert_refused(channel: Channel, why: str) -> None:
    """Check that the peer is sent a Refused with this reason, and that the connection is closed then."""
    while not isinstance(message := channel.receive(), Refused):
        pass
    assert why in message.reason, message.reason
    assert_dropped(channel)


def assert_dropped(channel: Channel) -> None:
    """Check that the connection ends."""
    with pytest.raises(ConnectionError):  # closed, or reset
        while True:
            channel.receive(lambda _message, size: memoryview(bytearray(size)))
    channel.close()


def assert_hung_up(sock: socket.socket) -> None:
    """Check that the connection ends, whatever is sent before."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    sock.close()


@contextlib.contextmanager
def under_attack(**options: Any) -> Iterator[Target]:
    """Run a job with two honest workers. At the end, check that the model has their updates and no others."""
    with job("asp", shards=2, workers=2, token=TOKEN, shard_token=SHARD_TOKEN, **options) as running:
        honest = HonestWorkers(running)
        honest.assert_progress()
        yield Target(running, honest)
        honest.stop.set()
        for thread in honest.threads:
            thread.join(PATIENCE)
        assert not honest.errors
        client = honest.client(2)
        weights = np.zeros(SIZE, dtype=np.float32)
        client.begin(weights.data.cast("B"))
        assert weights.tolist() == [float(sum(honest.updates))] * SIZE
        client.close()


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with under_attack() as attacked:
        yield attacked


@pytest.fixture(autouse=True)
def honest_workers_continue(target: Target) -> Iterator[None]:
    """Check after each test that the honest workers still make progress."""
    yield
    target.honest.assert_progress()
    while target.sockets:
        target.sockets.pop().close()


PORTS: list[Callable[[Target], int]] = [lambda target: target.coordinator, lambda target: target.shards[0]]
EVERYWHERE = pytest.mark.parametrize("port", PORTS, ids=["coordinator", "shard"])


# Peers that do not know the token


@EVERYWHERE
def test_random_bytes_are_refused(target: Target, port: Callable[[Target], int]) -> None:
    chance = random.Random(1)
    for size in (1, 15, 16, 17, 1000, 100_000):
        sock = target.socket(port(target))
        with contextlib.suppress(OSError):  # the connection may have ended already
            sock.sendall(chance.randbytes(size))
            sock.shutdown(socket.SHUT_WR)
        assert_hung_up(sock)


@EVERYWHERE
@pytest.mark.parametrize(
    "prefix",
    [
        PREFIX.pack(MAGIC, VERSION, 0xFFFF, 2**63),
        PREFIX.pack(MAGIC, VERSION, 10, 2**64 - 1),
        PREFIX.pack(MAGIC, VERSION, 0, 0),
        encode(Proof(b"n" * 32, b"m" * 32), 2**63),
        encode(Join(0), 16 << 20),  # as long as a description may be, but before the handshake
    ],
    ids=["head-and-2^63", "2^64-1", "nothing", "proof-with-2^63", "a-description-before-the-handshake"],
)
def test_absurd_lengths_are_refused(target: Target, port: Callable[[Target], int], prefix: bytes) -> None:
    sock = target.socket(port(target))
    sock.sendall(prefix + b"\x00" * 64)
    assert_hung_up(sock)


@EVERYWHERE
def test_a_byte_at_a_time_does_not_extend_the_handshake(target: Target, port: Callable[[Target], int]) -> None:
    """The time limit is for the whole handshake, even if the peer keeps sending."""
    sock = target.socket(port(target))
    began = time.monotonic()
    sock.settimeout(0.05)
    frame = iter(encode(Proof(b"n" * 32, b"m" * 32)) * 1000)
    while time.monotonic() - began < PATIENCE:
        try:
            sock.send(bytes([next(frame)]))
            if sock.recv(4096) == b"":
                break
        except TimeoutError:
            continue
        except ConnectionError:
            break
    else:
        pytest.fail("the connection is still open")
    sock.close()


@EVERYWHERE
def test_a_wrong_token_is_refused(target: Target, port: Callable[[Target], int]) -> None:
    with pytest.raises(ConnectionError, match="token is wrong"):
        target.connect(port(target), b"a guess")


@EVERYWHERE
def test_a_recorded_handshake_is_refused(target: Target, port: Callable[[Target], int]) -> None:
    channel = Channel(target.socket(port(target)), ANY_MESSAGE)
    channel.limit_silence(PATIENCE)
    recorded = handshake.proof(token_for("worker", TOKEN), channel.receive())
    channel.send(recorded)
    channel.receive()
    channel.close()
    again = Channel(target.socket(port(target)), ANY_MESSAGE)
    again.limit_silence(PATIENCE)
    again.receive()
    again.send(recorded)
    assert_refused(again, "token is wrong")


@EVERYWHERE
def test_another_message_in_place_of_a_proof_is_refused(target: Target, port: Callable[[Target], int]) -> None:
    for message in (Join(0), Hello(0, 1, b""), Pull(0), Proof(b"", b"")):
        channel = Channel(target.socket(port(target)), ANY_MESSAGE)
        channel.limit_silence(PATIENCE)
        channel.receive()
        channel.send(message)
        assert_dropped(channel)


@EVERYWHERE
def test_three_hundred_silent_peers_do_not_block_others(target: Target, port: Callable[[Target], int]) -> None:
    silent = [target.socket(port(target)) for _ in range(300)]
    target.honest.assert_progress()
    for sock in silent:
        assert_hung_up(sock)  # when its time limit has passed, or before
    target.connect(port(target)).close()  # there is room again


# Peers that know the token


def test_deeply_nested_heads_are_refused(target: Target) -> None:
    head = b"\x93\xa4Pull\x01" + b"\x91" * 60_000 + b"\x01"
    for port in (target.coordinator, target.shards[0]):
        channel = target.connect(port)
        channel._socket.sendall(PREFIX.pack(MAGIC, VERSION, len(head), 0) + head)
        assert_refused(channel, "not accepted here")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"[" * 1_000_000, "cannot be read"),
        (b"\xff" * (16 << 20), "cannot be read"),
        (b" " * (16 << 20), "cannot be read"),
        (b"{}", "cannot be read"),
        (b"", "cannot be read"),
        (DESCRIPTION.replace(b"[64]", b"[1099511627776]"), "same model"),
        (DESCRIPTION.replace(b"[64]", b"[1099511627777]"), "cannot be read"),
        (DESCRIPTION.replace(b"[64]", b"[65]"), "same model"),
        (DESCRIPTION.replace(b"SGD", b"Adam"), "the optimizer is SGD here"),
        (json.dumps({"layout": {"tensors": [["w", [1], "float32", 0]] * 2}, "optimizer": 1}).encode(), "twice"),
    ],
    ids=["deep", "16MB-of-rubbish", "16MB-of-blanks", "empty", "none", "2^40", "more", "other", "adam", "twice"],
)
def test_absurd_descriptions_are_refused(target: Target, text: bytes, why: str) -> None:
    channel = target.connect(target.coordinator)
    channel.send(Join(7), memoryview(text))
    assert_refused(channel, why)


def test_a_description_that_is_too_long_is_refused(target: Target) -> None:
    channel = target.connect(target.coordinator)
    channel._socket.sendall(encode(Join(7), (16 << 20) + 1))
    assert_refused(channel, "is not accepted here")


@pytest.mark.parametrize("number", [-1, 2**31, 2**62])
def test_absurd_worker_numbers_are_refused(target: Target, number: int) -> None:
    channel = target.connect(target.coordinator)
    channel.send(Join(number), memoryview(DESCRIPTION))
    assert_refused(channel, "A worker's number")


def test_a_second_worker_with_the_same_number_is_refused(target: Target) -> None:
    channel = target.connect(target.coordinator)
    channel.send(Join(0), memoryview(DESCRIPTION))
    assert_refused(channel, "There already is a worker 0")


def test_a_worker_that_claims_to_be_another_is_refused(target: Target) -> None:
    control, welcome = target.join_job()
    for number, incarnation in ((0, 1), (1, 1), (7, welcome.incarnation + 1)):
        channel = target.connect(target.shards[1])
        channel.send(Hello(number, incarnation, welcome.ticket))
        assert_refused(channel, "ticket")
        channel = target.connect(target.coordinator)
        channel.send(Resume(number, incarnation, welcome.ticket, target.running.coordinator.generation))
        assert_refused(channel, "ticket")
    channel = target.connect(target.coordinator)
    channel.send(Resume(7, welcome.incarnation, welcome.ticket, "another generation"))
    assert isinstance(channel.receive(), Expelled)
    control.send(Leave())
    receive_until(control, Leave)


def test_a_worker_that_claims_to_be_a_shard_is_refused(target: Target) -> None:
    for shard in (0, 2, -1):
        channel = target.connect(target.coordinator)
        channel.send(Register(shard, 1, b"secret", "generation"))
        assert_refused(channel, "not expected here")
    channel = target.connect(target.coordinator, token_for("shard", SHARD_TOKEN))
    channel.send(Register(0, 1, b"another secret", target.running.coordinator.generation))
    assert_refused(channel, "There is a shard 0 already")


@pytest.mark.parametrize(
    "ready",
    [
        GradientReady(1, 0, 0, 0.1, None),
        GradientReady(1, 0, -1, 0.1, None),
        GradientReady(1, 0, 2**62, 0.1, None),
        GradientReady(1, 0, 1, float("nan"), None),
        GradientReady(1, 0, 1, float("inf"), None),
        GradientReady(1, 0, 1, 1e300, None),
        GradientReady(1, 0, 1, -1.0, None),
        GradientReady(1, 2**62, 1, 0.1, None),
        GradientReady(1, -1, 1, 0.1, None),
        GradientReady(2, 0, 1, 0.1, None),
        GradientReady(0, 0, 1, 0.1, None),
        GradientReady(-1, 0, 1, 0.1, None, (1, 2, 3)),
    ],
    ids=str,
)
def test_an_absurd_gradient_ready_is_refused(target: Target, ready: GradientReady) -> None:
    channel, _, _ = target.member()
    channel.send(ready)
    assert_refused(channel, "")
    assert 7 not in target.running.coordinator.state.roster.training


def test_gradient_ready_before_the_first_grant_is_refused(target: Target) -> None:
    channel, _ = target.join_job()
    channel.send(GradientReady(0, 0, 1, 0.1, None))
    assert_refused(channel, "was not granted")


@pytest.mark.parametrize(
    "wanted",
    [
        RequestSamples(1, 0, 1000, 1),
        RequestSamples(1, -1, 1000, 1),
        RequestSamples(1, 1, 0, 1),
        RequestSamples(1, 1, 2**62, 1),
        RequestSamples(1, 1, 1000, 2**62),
        RequestSamples(1, 1, 1000, 1, 2**62),
        RequestSamples(1, 1, 1000, -1),
    ],
    ids=str,
)
def test_absurd_requests_for_samples_are_refused(target: Target, wanted: RequestSamples) -> None:
    channel, _, _ = target.member()
    channel.send(wanted)
    assert_refused(channel, "")


def test_a_worker_that_requests_samples_without_end_is_refused(target: Target) -> None:
    from paceline.job.limits import MAX_TAKEN

    channel, _, _ = target.member()
    for number in range(MAX_TAKEN + 1):
        channel.send(RequestSamples(number, 1, 1000, 10**6))
        if number % 512 == 511:
            while receive_until(channel, SampleRange).number < number - 1:
                pass
    assert_refused(channel, "wants more")


def test_messages_that_the_coordinator_does_not_expect_are_refused(target: Target) -> None:
    for message in (
        messages.Heartbeat(),
        Leave(),
        RequestSamples(1, 1, 1000, 1),
        messages.UpdateReceived(Identity(0, 1, 1)),
    ):
        channel = target.connect(target.coordinator)
        channel.send(message)
        assert_refused(channel, "not expected here")
    channel, _, _ = target.member()
    channel.send(messages.UpdateReceived(Identity(0, 1, 10**9)))
    assert_refused(channel, "not expected here")


@pytest.mark.parametrize(
    "message",
    [
        Setup(((0, SIZE),)),
        ApplyUpdates(10**9, (Identity(0, 1, 1),), (1.0,), None),
        SavePart(1, "/tmp"),
        messages.Stop(),
        ProvideWeights(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_worker_cannot_give_orders_to_a_shard(target: Target, message: Any) -> None:
    channel, welcome, _ = target.member()
    shard = target.at_shard(welcome)
    shard.send(message)
    assert_refused(shard, "not accepted here")
    channel.send(Leave())
    receive_until(channel, Leave)


def body(fill: float = 1.0, elements: int = SIZE // 2, dtype: Any = np.float32) -> memoryview:
    return np.full(elements, fill, dtype=dtype).data.cast("B")


@pytest.mark.parametrize(
    ("push", "fill", "elements", "dtype", "why"),
    [
        (Push(1, (1.0,)), float("nan"), 32, np.float32, "NaN"),
        (Push(1, (1.0,)), float("-inf"), 32, np.float32, "NaN or infinity"),
        (Push(1, (1.0,)), 1.0, 31, np.float32, "bytes"),
        (Push(1, (1.0,)), 1.0, 33, np.float32, "bytes"),
        (Push(1, (1.0,)), 1.0, 32, np.float64, "bytes"),
        (Push(1, (1.0,), "float64"), 1.0, 32, np.float64, "is sent as"),
        (Push(1, (1.0,), "x" * 1000), 1.0, 32, np.float32, "is sent as"),
        (Push(1, (1.0,), "float16"), float("nan"), 32, np.float16, "NaN"),
        (Push(1, (1.0, 1.0)), 1.0, 32, np.float32, "learning rates"),
        (Push(1, ()), 1.0, 32, np.float32, "learning rates"),
        (Push(1, (float("inf"),)), 1.0, 32, np.float32, "learning rates"),
        (Push(1, (float("nan"),)), 1.0, 32, np.float32, "learning rates"),
        (Push(1, (-1.0,)), 1.0, 32, np.float32, "learning rates"),
        (Push(1, (1e300,)), 1.0, 32, np.float32, "learning rates"),
        (Push(1, (1.0,)), 3e38, 32, np.float32, "numbers above"),
        (Push(1, (1.0,) * 5000), 1.0, 32, np.float32, "learning rates"),
    ],
    ids=[
        *("nan", "infinity", "too-few", "too-many", "doubles", "float64", "no-type", "nan-in-two-bytes"),
        *(
            "two-rates",
            "no-rates",
            "infinite-rate",
            "nan-rate",
            "negative-rate",
            "huge-rate",
            "huge-elements",
            "5000-rates",
        ),
    ],
)
def test_bad_pushes_are_refused(target: Target, push: Push, fill: float, elements: int, dtype: Any, why: str) -> None:
    channel, welcome, _ = target.member()
    shard = target.at_shard(welcome)
    shard.send(push, body(fill, elements, dtype))
    assert_refused(shard, why)
    channel.send(Leave())
    receive_until(channel, Leave)


def test_a_push_without_a_body_is_refused(target: Target) -> None:
    channel, welcome, _ = target.member()
    shard = target.at_shard(welcome)
    shard.send(Push(1, (1.0,)))
    assert_refused(shard, "must have a body")
    channel.send(Leave())
    receive_until(channel, Leave)


@pytest.mark.parametrize("iteration", [-1, 0, 2, 2**62])
def test_a_push_that_was_not_granted_is_refused(target: Target, iteration: int) -> None:
    channel, welcome, granted = target.member()
    assert granted.iteration == 1
    for number in (0, 1):
        shard = target.at_shard(welcome, number)
        with contextlib.suppress(ConnectionError):  # the worker may have been refused already
            shard.send(Push(iteration, (1.0,)), body())
            assert isinstance(shard.receive(), PushReceived | Expelled)
    assert_refused(channel, "was not granted")


def test_unrequested_initial_weights_are_refused(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.serve.shard.shard.NAMING_SECONDS", 0.2)
    channel, welcome, _ = target.member()
    shard = target.at_shard(welcome)
    shard.send(InitialWeights(), body())
    assert_refused(shard, "was not asked")
    channel.send(Leave())
    receive_until(channel, Leave)


def test_a_pull_of_a_future_version_ends_with_its_worker(target: Target) -> None:
    """The shard waits for that version until the worker leaves."""
    channel, welcome, _ = target.member()
    shard = target.at_shard(welcome)
    shard.send(Pull(2**62))
    channel.send(Leave())
    receive_until(channel, Leave)
    assert_dropped(shard)


@pytest.mark.parametrize("expected", [-1, MAX_STALENESS + 1, 10**9, 2**62, -(2**62)])
def test_an_absurd_expected_staleness_is_refused(target: Target, expected: int) -> None:
    channel, welcome, granted = target.member()
    shard = target.at_shard(welcome)
    shard.send(Pull(granted.version, expected))
    assert_refused(shard, f"0 to {MAX_STALENESS} versions stale, not {expected}")
    channel.send(Leave())
    receive_until(channel, Leave)


@pytest.mark.parametrize("expected", ["3", b"3", 2.5, float("inf"), True, [3], {"steps": 3}], ids=str)
def test_an_expected_staleness_that_is_not_an_integer_is_refused(target: Target, expected: Any) -> None:
    channel, welcome, granted = target.member()
    shard = target.at_shard(welcome)
    head = msgspec.msgpack.encode(["Pull", granted.version, expected])
    shard._socket.sendall(PREFIX.pack(MAGIC, VERSION, len(head), 0) + head)
    assert_refused(shard, "not accepted here")
    channel.send(Leave())
    receive_until(channel, Leave)


@pytest.mark.slow
def test_a_peer_that_does_not_read_is_cut_off(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that wait for it are bounded."""
    monkeypatch.setattr(async_channel, "MAX_UNSENT", 1 << 16)  # else the coordinator answers for half a minute
    channel, _, _ = target.member()
    channel._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    frame = encode(messages.Heartbeat()) * 1000
    sent = 0
    with pytest.raises(OSError):
        channel._socket.settimeout(PATIENCE)
        while sent < 1 << 30:
            sent += channel._socket.send(frame)
    channel.close()


def test_refused_peers_are_counted(target: Target) -> None:
    before = target.running.coordinator.faults
    channel = target.connect(target.coordinator)
    channel.send(Register(0, 1, b"secret", "generation"))
    assert_refused(channel, "not expected here")
    channel = target.connect(target.shards[1])
    channel.send(Hello(0, 1, b"no ticket"))
    assert_refused(channel, "ticket")
    end = time.monotonic() + PATIENCE
    while target.running.coordinator.faults < before + 2:  # a shard reports its own a moment later
        assert time.monotonic() < end, "they are not counted"
        time.sleep(0.005)


def test_an_endpoint_without_the_token_cannot_be_opened(target: Target) -> None:
    with pytest.raises(ConnectionError):
        Endpoint("127.0.0.1", target.coordinator, b"").open(ANY_MESSAGE)
