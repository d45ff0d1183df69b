"""Hostile and broken peers against a job that runs: each gets a clear error or is dropped, and nobody else notices.

Two honest workers train all the while; every one of their updates adds one to every weight. After each attack they must
go on, and in the end the weights must be exactly the number of their updates.
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
from paceline.serve.wire import handshake, messages
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
from paceline.serve.worker.client import Client
from train.jobs import Job, job

SIZE = 64
TOKEN, SHARD_TOKEN = b"secret", b"the shards' own"
DESCRIPTION = Description(Layout((Tensor("w", (SIZE,)),)), OptimizerSpec("SGD", ({"lr": 1.0},))).as_json()
ANYTHING = MessageDecoder(functools.reduce(operator.or_, Message.__subclasses__()))
PATIENCE = 30.0


class Honest:
    """Workers that train until they are told to stop."""

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
                time.sleep(0.002)  # leave the machine to the attackers
            client.close()
        except BaseException as error:
            self.errors.append(error)

    def goes_on(self) -> None:
        """Both get some more updates through."""
        wanted = [count + 2 for count in self.updates]
        end = time.monotonic() + PATIENCE
        while any(count < want for count, want in zip(self.updates, wanted, strict=True)):
            assert not self.errors, self.errors
            assert time.monotonic() < end, "the honest workers are held up"
            time.sleep(0.005)


class Target:
    """What is attacked."""

    def __init__(self, running: Job, honest: Honest) -> None:
        self.running, self.honest = running, honest
        self.coordinator = honest.port
        self.sockets: list[socket.socket] = []  # all that were opened, to be closed when their test is over
        self.shards = [port for _, port in running.coordinator.shards.addresses.values()]

    def socket(self, port: int) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", port))
        sock.settimeout(PATIENCE)
        self.sockets.append(sock)
        return sock

    def greeted(self, port: int, token: bytes = TOKEN) -> Channel:
        sock = self.socket(port)
        channel = Channel(sock, ANYTHING)
        sock.settimeout(PATIENCE)
        channel.limit_silence(PATIENCE)
        handshake.call(channel, token)
        return channel

    def joined(self, number: int = 7) -> tuple[Channel, Welcome]:
        channel = self.greeted(self.coordinator)
        channel.send(Join(number), memoryview(DESCRIPTION))
        return channel, hears(channel, Welcome)

    def member(self, number: int = 7) -> tuple[Channel, Welcome, GrantIteration]:
        """Joined and granted, at the coordinator."""
        channel, welcome = self.joined(number)
        return channel, welcome, hears(channel, GrantIteration)

    def at_shard(self, welcome: Welcome, shard: int = 0) -> Channel:
        channel = self.greeted(self.shards[shard])
        channel.send(Hello(welcome.worker, welcome.incarnation, welcome.ticket))
        return channel


def hears(channel: Channel, kind: type) -> Any:
    while not isinstance(message := channel.receive(), kind):
        assert not isinstance(message, Refused | Expelled), message
    return message


def is_refused(channel: Channel, why: str) -> None:
    """It is told why, in a sentence, and hung up on."""
    while not isinstance(message := channel.receive(), Refused):
        pass
    assert why in message.reason, message.reason
    is_dropped(channel)


def is_dropped(channel: Channel) -> None:
    with pytest.raises(ConnectionError):  # closed, or reset
        while True:
            channel.receive(lambda _message, size: memoryview(bytearray(size)))
    channel.close()


def is_hung_up_on(sock: socket.socket) -> None:
    """Whatever it hears first, the connection ends."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    sock.close()


@contextlib.contextmanager
def under_attack(**options: Any) -> Iterator[Target]:
    """A job with two honest workers. Whoever comes last sees exactly what the honest ones did."""
    with job("asp", shards=2, workers=2, token=TOKEN, shard_token=SHARD_TOKEN, **options) as running:
        honest = Honest(running)
        honest.goes_on()
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
    from paceline.serve.coordinator import listener
    from paceline.serve.wire import endpoint

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listener, "GREETING_SECONDS", 2.0)
        patch.setattr(endpoint, "SECONDS", 2.0)
        with under_attack() as attacked:
            yield attacked


@pytest.fixture(autouse=True)
def others_go_on(target: Target) -> Iterator[None]:
    yield
    target.honest.goes_on()
    while target.sockets:
        target.sockets.pop().close()


PORTS: list[Callable[[Target], int]] = [lambda target: target.coordinator, lambda target: target.shards[0]]
EVERYWHERE = pytest.mark.parametrize("port", PORTS, ids=["coordinator", "shard"])


# Strangers


@EVERYWHERE
def test_random_bytes(target: Target, port: Callable[[Target], int]) -> None:
    chance = random.Random(1)
    for size in (1, 15, 16, 17, 1000, 100_000):
        sock = target.socket(port(target))
        with contextlib.suppress(OSError):  # it may have been hung up on already
            sock.sendall(chance.randbytes(size))
            sock.shutdown(socket.SHUT_WR)
        is_hung_up_on(sock)


@EVERYWHERE
@pytest.mark.parametrize(
    "prefix",
    [
        PREFIX.pack(MAGIC, VERSION, 0xFFFF, 2**63),
        PREFIX.pack(MAGIC, VERSION, 10, 2**64 - 1),
        PREFIX.pack(MAGIC, VERSION, 0, 0),
        encode(Proof(b"n" * 32, b"m" * 32), 2**63),
        encode(Join(0), 16 << 20),  # as long as a description may be, but not from a stranger
    ],
    ids=["head-and-2^63", "2^64-1", "nothing", "proof-with-2^63", "a-strangers-description"],
)
def test_absurd_lengths(target: Target, port: Callable[[Target], int], prefix: bytes) -> None:
    sock = target.socket(port(target))
    sock.sendall(prefix + b"\x00" * 64)
    is_hung_up_on(sock)


@EVERYWHERE
def test_a_byte_at_a_time(target: Target, port: Callable[[Target], int]) -> None:
    """The whole greeting has its time, however busy a stranger looks."""
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
        pytest.fail("it is still listened to")
    sock.close()


@EVERYWHERE
def test_a_wrong_token(target: Target, port: Callable[[Target], int]) -> None:
    with pytest.raises(ConnectionError, match="token is wrong"):
        target.greeted(port(target), b"a guess")


@EVERYWHERE
def test_a_recorded_greeting(target: Target, port: Callable[[Target], int]) -> None:
    channel = Channel(target.socket(port(target)), ANYTHING)
    channel.limit_silence(PATIENCE)
    recorded = handshake.proof(TOKEN, channel.receive())
    channel.send(recorded)
    channel.receive()
    channel.close()
    again = Channel(target.socket(port(target)), ANYTHING)
    again.limit_silence(PATIENCE)
    again.receive()
    again.send(recorded)
    is_refused(again, "token is wrong")


@EVERYWHERE
def test_a_greeting_that_is_none(target: Target, port: Callable[[Target], int]) -> None:
    for message in (Join(0), Hello(0, 1, b""), Pull(0), Proof(b"", b"")):
        channel = Channel(target.socket(port(target)), ANYTHING)
        channel.limit_silence(PATIENCE)
        channel.receive()
        channel.send(message)
        is_dropped(channel)


@EVERYWHERE
def test_three_hundred_who_say_nothing(target: Target, port: Callable[[Target], int]) -> None:
    silent = [target.socket(port(target)) for _ in range(300)]
    target.honest.goes_on()
    for sock in silent:
        is_hung_up_on(sock)  # when its time is over, or before
    target.greeted(port(target)).close()  # and there is room again


# Those who know the token


def test_heads_nested_a_thousand_deep(target: Target) -> None:
    head = b"\x93\xa4Pull\x01" + b"\x91" * 60_000 + b"\x01"
    for port in (target.coordinator, target.shards[0]):
        channel = target.greeted(port)
        channel._socket.sendall(PREFIX.pack(MAGIC, VERSION, len(head), 0) + head)
        is_refused(channel, "not taken here")


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
def test_absurd_descriptions(target: Target, text: bytes, why: str) -> None:
    channel = target.greeted(target.coordinator)
    channel.send(Join(7), memoryview(text))
    is_refused(channel, why)


def test_a_description_that_is_too_long(target: Target) -> None:
    channel = target.greeted(target.coordinator)
    channel._socket.sendall(encode(Join(7), (16 << 20) + 1))
    is_refused(channel, "is not taken here")


@pytest.mark.parametrize("number", [-1, 2**31, 2**62])
def test_absurd_workers(target: Target, number: int) -> None:
    channel = target.greeted(target.coordinator)
    channel.send(Join(number), memoryview(DESCRIPTION))
    is_refused(channel, "A worker's number")


def test_a_worker_that_is_there_already(target: Target) -> None:
    channel = target.greeted(target.coordinator)
    channel.send(Join(0), memoryview(DESCRIPTION))
    is_refused(channel, "There is a worker 0 already")


def test_one_who_says_that_it_is_another(target: Target) -> None:
    _, welcome = mine = target.joined()
    for number, incarnation in ((0, 1), (1, 1), (7, welcome.incarnation + 1)):
        channel = target.greeted(target.shards[1])
        channel.send(Hello(number, incarnation, welcome.ticket))
        is_refused(channel, "does not have its ticket")
        channel = target.greeted(target.coordinator)
        channel.send(Resume(number, incarnation, welcome.ticket, target.running.coordinator.generation))
        is_refused(channel, "does not have its ticket")
    channel = target.greeted(target.coordinator)
    channel.send(Resume(7, welcome.incarnation, welcome.ticket, "another generation"))
    assert isinstance(channel.receive(), Expelled)
    mine[0].send(Leave())
    hears(mine[0], Leave)


def test_one_who_says_that_it_is_a_shard(target: Target) -> None:
    for shard in (0, 2, -1):
        channel = target.greeted(target.coordinator)
        channel.send(Register(shard, 1))
        is_refused(channel, "out of place")
    channel = target.greeted(target.coordinator, SHARD_TOKEN)
    channel.send(Register(0, 1))
    is_refused(channel, "There is a shard 0 already")


@pytest.mark.parametrize(
    "ready",
    [
        GradientReady(1, 0, 0, 0.1, None),
        GradientReady(1, 0, -1, 0.1, None),
        GradientReady(1, 0, 2**62, 0.1, None),
        GradientReady(1, 0, 1, float("nan"), None),
        GradientReady(1, 0, 1, float("inf"), None),
        GradientReady(1, 0, 1, -1.0, None),
        GradientReady(1, 2**62, 1, 0.1, None),
        GradientReady(1, -1, 1, 0.1, None),
        GradientReady(2, 0, 1, 0.1, None),
        GradientReady(0, 0, 1, 0.1, None),
        GradientReady(-1, 0, 1, 0.1, None, (1, 2, 3)),
    ],
    ids=str,
)
def test_absurd_readies(target: Target, ready: GradientReady) -> None:
    channel, _, _ = target.member()
    channel.send(ready)
    is_refused(channel, "")
    assert 7 not in target.running.coordinator.state.roster.training


def test_ready_before_anything_was_granted(target: Target) -> None:
    channel, _ = target.joined()
    channel.send(GradientReady(0, 0, 1, 0.1, None))
    is_refused(channel, "was not granted")


@pytest.mark.parametrize(
    "want",
    [
        RequestSamples(1, 0, 1000, 1),
        RequestSamples(1, -1, 1000, 1),
        RequestSamples(1, 1, 0, 1),
        RequestSamples(1, 1, 2**62, 1),
        RequestSamples(1, 1, 1000, -1),
    ],
    ids=str,
)
def test_absurd_wants(target: Target, want: RequestSamples) -> None:
    channel, _, _ = target.member()
    channel.send(want)
    is_refused(channel, "")


def test_one_who_takes_and_takes(target: Target) -> None:
    from paceline.job.iterations import MAX_TAKEN

    channel, _, _ = target.member()
    for number in range(MAX_TAKEN + 1):
        channel.send(RequestSamples(number, 1, 1000, 10**6))
        if number % 512 == 511:
            while hears(channel, SampleRange).number < number - 1:
                pass
    is_refused(channel, "wants more")


def test_what_does_not_belong_at_the_coordinator(target: Target) -> None:
    for message in (
        messages.Heartbeat(),
        Leave(),
        RequestSamples(1, 1, 1000, 1),
        messages.UpdateReceived(Identity(0, 1, 1)),
    ):
        channel = target.greeted(target.coordinator)
        channel.send(message)
        is_refused(channel, "out of place")
    channel, _, _ = target.member()
    channel.send(messages.UpdateReceived(Identity(0, 1, 10**9)))
    is_refused(channel, "out of place")


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
def test_orders_from_a_worker(target: Target, message: Any) -> None:
    channel, welcome, _ = target.member()
    shard = target.at_shard(welcome)
    shard.send(message)
    is_refused(shard, "not taken here")
    channel.send(Leave())
    hears(channel, Leave)


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
        (Push(1, (1.0,) * 5000), 1.0, 32, np.float32, "learning rates"),
    ],
    ids=[
        *("nan", "infinity", "too-few", "too-many", "doubles", "float64", "no-type", "nan-in-two-bytes"),
        *("two-rates", "no-rates", "infinite-rate", "nan-rate", "negative-rate", "5000-rates"),
    ],
)
def test_bad_pushes(target: Target, push: Push, fill: float, elements: int, dtype: Any, why: str) -> None:
    channel, welcome, _ = target.member()
    shard = target.at_shard(welcome)
    shard.send(push, body(fill, elements, dtype))
    is_refused(shard, why)
    channel.send(Leave())
    hears(channel, Leave)


def test_a_push_without_a_body(target: Target) -> None:
    channel, welcome, _ = target.member()
    shard = target.at_shard(welcome)
    shard.send(Push(1, (1.0,)))
    is_refused(shard, "must have a body")
    channel.send(Leave())
    hears(channel, Leave)


@pytest.mark.parametrize("iteration", [-1, 0, 2, 2**62])
def test_a_push_that_was_not_granted(target: Target, iteration: int) -> None:
    channel, welcome, granted = target.member()
    assert granted.iteration == 1
    for number in (0, 1):
        shard = target.at_shard(welcome, number)
        with contextlib.suppress(ConnectionError):  # it may have been turned out already
            shard.send(Push(iteration, (1.0,)), body())
            assert isinstance(shard.receive(), PushReceived | Expelled)
    is_refused(channel, "was not granted")


def test_first_weights_that_nobody_asked_for(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.serve.shard.shard.NAMING_SECONDS", 0.2)
    channel, welcome, _ = target.member()
    shard = target.at_shard(welcome)
    shard.send(InitialWeights(), body())
    is_refused(shard, "was not asked")
    channel.send(Leave())
    hears(channel, Leave)


def test_a_pull_of_a_version_to_come(target: Target) -> None:
    """It waits for it, and is let go with its worker."""
    channel, welcome, _ = target.member()
    shard = target.at_shard(welcome)
    shard.send(Pull(2**62))
    channel.send(Leave())
    hears(channel, Leave)
    is_dropped(shard)


@pytest.mark.parametrize("expected", [-1, MAX_STALENESS + 1, 10**9, 2**62, -(2**62)])
def test_absurd_staleness(target: Target, expected: int) -> None:
    channel, welcome, granted = target.member()
    shard = target.at_shard(welcome)
    shard.send(Pull(granted.version, expected))
    is_refused(shard, f"0 to {MAX_STALENESS} versions stale, not {expected}")
    channel.send(Leave())
    hears(channel, Leave)


@pytest.mark.parametrize("expected", ["3", b"3", 2.5, float("inf"), True, [3], {"steps": 3}], ids=str)
def test_staleness_that_is_no_number(target: Target, expected: Any) -> None:
    channel, welcome, granted = target.member()
    shard = target.at_shard(welcome)
    head = msgspec.msgpack.encode(["Pull", granted.version, expected])
    shard._socket.sendall(PREFIX.pack(MAGIC, VERSION, len(head), 0) + head)
    is_refused(shard, "not taken here")
    channel.send(Leave())
    hears(channel, Leave)


def test_one_who_does_not_read(target: Target) -> None:
    """What waits for it is bounded."""
    channel, _, _ = target.member()
    frame = encode(messages.Heartbeat()) * 1000
    sent = 0
    with pytest.raises(OSError):
        channel._socket.settimeout(PATIENCE)
        while sent < 1 << 30:
            sent += channel._socket.send(frame)
    channel.close()


def test_each_is_counted(target: Target) -> None:
    before = target.running.coordinator.faults
    channel = target.greeted(target.coordinator)
    channel.send(Register(0, 1))
    is_refused(channel, "out of place")
    channel = target.greeted(target.shards[1])
    channel.send(Hello(0, 1, b"no ticket"))
    is_refused(channel, "does not have its ticket")
    end = time.monotonic() + PATIENCE
    while target.running.coordinator.faults < before + 2:  # a shard tells of its own a moment later
        assert time.monotonic() < end, "nobody counted"
        time.sleep(0.005)


def test_a_door_of_another_token_stays_shut(target: Target) -> None:
    with pytest.raises(ConnectionError):
        Endpoint("127.0.0.1", target.coordinator, b"").open(ANYTHING)
