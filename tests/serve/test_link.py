"""Emulated links: bytes pass at the rate of the link, however many processes send, and arrive as they were sent."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("msgspec")

from paceline.serve.environment import LINK
from paceline.serve.wire import link
from paceline.serve.wire.frames import Channel, MessageDecoder, PiecedBody
from paceline.serve.wire.link import RECEIVING, SENDING, EmulatedLinks, LinkPath, emulated
from paceline.serve.wire.messages import Push, Weights
from tries import tries

RATE = 1e6  # bytes per second
GOODPUT = RATE * link.PAYLOAD_SHARE


class Clock:
    """A clock that stands still except while somebody sleeps. It may wake sleepers too late."""

    def __init__(self, late: Iterator[float] | None = None) -> None:
        self.now = 100.0
        self._late = late or itertools.repeat(0.0)
        self.on_sleep: Callable[[], None] = lambda: None

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.on_sleep()
        self.now += seconds + next(self._late)


@pytest.fixture
def links(tmp_path: Path) -> Iterator[EmulatedLinks]:
    EmulatedLinks.create(tmp_path / "links", RATE, workers=3, servers=1)
    opened = EmulatedLinks(tmp_path / "links")
    yield opened
    opened.close()


def path_of(links: EmulatedLinks, clock: Clock, sender: int = 0, receiver: int = 3) -> LinkPath:
    return LinkPath(links, sender, receiver, clock.read, clock.sleep)


def carry(path: LinkPath, size: int, head: int = 20) -> None:
    """Carry a message of this size."""
    path.begin(head)
    left = size - head
    while left:
        left -= path.carry(left)


def test_a_message_takes_its_size_over_the_rate(links: EmulatedLinks) -> None:
    clock = Clock()
    carry(path_of(links, clock), 500_000)
    assert clock.now - 100.0 == pytest.approx(500_000 / GOODPUT, abs=1e-4)


def test_a_fast_link_has_larger_frames(tmp_path: Path) -> None:
    EmulatedLinks.create(tmp_path / "links", 100 * RATE, 1, 1)
    links, clock = EmulatedLinks(tmp_path / "links"), Clock()
    carry(path_of(links, clock, receiver=1), 50_000_000)
    assert clock.now - 100.0 == pytest.approx(0.5 / link.FAST_PAYLOAD_SHARE, abs=1e-3)
    links.close()


def test_two_senders_share_the_link_of_their_receiver(links: EmulatedLinks) -> None:
    threads = [threading.Thread(target=carry, args=(LinkPath(links, sender, 3), 20_000)) for sender in (0, 1)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began >= 40_000 / GOODPUT - 1e-3


def test_pieces_take_turns_on_a_link(links: EmulatedLinks) -> None:
    ends: dict[int, float] = {0: 0.0, 1: 0.0}
    for sender in (0, 1) * 10:  # each sends its next piece when the last one has arrived
        begin = links.reserve(sender, SENDING, 1.0, ends[sender])
        ends[sender] = links.reserve(3, RECEIVING, 1.0, begin) + 1.0
    assert sorted(ends.values()) == [19.0, 20.0]
    assert links.reserve(3, SENDING, 1.0, 0.0) == 0.0, "the other direction is free"
    assert links.reserve(2, RECEIVING, 1.0, 0.0) == 0.0, "and so is another host"


@tries(25, 60, derandomize=False)
@given(
    messages=st.lists(st.tuples(st.integers(21, 60_000), st.floats(0.0, 0.2)), min_size=1, max_size=6),
    late=st.lists(st.floats(0.0, 0.03) | st.floats(0.0, 0.5), min_size=1, max_size=8),
)
def test_no_more_bytes_pass_than_the_rate_and_a_burst(
    messages: list[tuple[int, float]], late: list[float], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In any interval. And a machine that wakes senders a little late does not make the link slower."""
    file = tmp_path_factory.mktemp("links") / "links"
    EmulatedLinks.create(file, RATE, 1, 1)
    links, clock = EmulatedLinks(file), Clock(itertools.cycle(late))
    path = path_of(links, clock, receiver=1)
    passed: list[tuple[float, int]] = []
    for size, pause in messages:
        began = clock.now
        path.begin(20)
        left = size - 20
        passed.append((clock.now, 20))
        while left:
            piece = path.carry(left)
            left -= piece
            passed.append((clock.now, piece))
        assert max(late) > link.LATE_SECONDS or clock.now - began <= size / GOODPUT + 2 * max(late) + 1e-3
        clock.now += pause
    links.close()
    burst = GOODPUT * (link.LATE_SECONDS + link.BACK_TO_BACK + link.NO_SLEEP) + 2 * link.MIN_PIECE
    for (start, _), (stop, _) in itertools.combinations(passed, 2):
        size = sum(each for at, each in passed if start <= at <= stop)
        assert size <= GOODPUT * (stop - start) + burst


RESERVES = """
import json, sys, threading
from pathlib import Path
from paceline.serve.wire.link import SENDING, EmulatedLinks
links, begins = EmulatedLinks(Path(sys.argv[1])), []
print("ready", flush=True)
sys.stdin.readline()
def reserve():
    for _ in range(2000):
        begins.append(links.reserve(0, SENDING, 1.0, 0.0))
threads = [threading.Thread(target=reserve) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps(begins))
"""


def test_processes_and_their_threads_never_use_a_link_at_the_same_time(tmp_path: Path) -> None:
    EmulatedLinks.create(tmp_path / "links", RATE, 1, 1)
    command = [sys.executable, "-c", RESERVES, str(tmp_path / "links")]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    for process in processes:
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    begins = [begin for process in processes for begin in json.loads(process.communicate()[0])]
    assert sorted(begins) == list(range(8000)), "every reservation has a second of its own"


def test_a_host_outside_the_network_is_an_error(links: EmulatedLinks) -> None:
    with pytest.raises(ValueError, match="4 hosts, and no number 4"):
        links.reserve(4, SENDING, 1.0, 0.0)


# Channels


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    pair = Channel(ours, MessageDecoder(Push | Weights)), Channel(theirs, MessageDecoder(Push | Weights))
    yield pair
    for channel in pair:
        channel.close()


def receive(channel: Channel, size: int) -> tuple[Any, bytes]:
    buffer = bytearray(size)
    return channel.receive(lambda message, announced: memoryview(buffer)), bytes(buffer)


def received_by(channel: Channel, size: int, send: Callable[[], None]) -> tuple[Any, bytes]:
    """Return the message and the body that a channel receives while another thread sends."""
    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    found = receive(channel, size)
    sender.join(10.0)
    assert not sender.is_alive()
    return found


def test_a_message_over_emulated_links_arrives_as_it_was_sent(
    channels: tuple[Channel, Channel], links: EmulatedLinks
) -> None:
    clock, body = Clock(), bytes(range(256)) * 1000
    channels[0].emulate(path_of(links, clock))
    found = received_by(channels[1], len(body), lambda: channels[0].send(Push(7, (0.1,)), memoryview(body)))
    assert found == (Push(7, (0.1,)), body)
    assert clock.now - 100.0 == pytest.approx(len(body) / GOODPUT, rel=0.01)
    channels[0].send(Push(8, (0.1,)))
    assert channels[1].receive() == Push(8, (0.1,))


def test_a_body_in_pieces_may_be_replaced_while_it_waits_for_a_link(
    channels: tuple[Channel, Channel], links: EmulatedLinks
) -> None:
    clock, body = Clock(), bytes(range(256)) * 1000
    pieces = PiecedBody(memoryview(body))
    sizes: list[int] = []

    def replace() -> None:
        """Replace the rest of the body by a copy. This would block if the sender held the lock while it waits."""
        assert pieces.lock.acquire(blocking=False), "the sender waits for a link and holds the lock"
        pieces.rest = memoryview(bytes(pieces.rest))
        pieces.lock.release()

    clock.on_sleep = replace
    channels[0].emulate(path_of(links, clock))
    send = lambda: channels[0].send_pieces(Weights(3), pieces, sizes.append)  # noqa: E731
    assert received_by(channels[1], len(body), send) == (Weights(3), body)
    assert sum(sizes) == len(body)
    assert clock.now - 100.0 == pytest.approx(len(body) / GOODPUT, rel=0.01)


# Jobs


def test_hosts_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated(RATE, workers=2, servers=1) as environment:
        monkeypatch.setenv(LINK, environment[LINK])
        there, back = link.worker_to_shard(1, 0), link.shard_to_worker(0, 1)
        assert there and (there._sender, there._receiver) == (1, 2)
        assert back and (back._sender, back._receiver) == (2, 1)
    assert not Path(environment[LINK]).exists()
    with emulated(RATE, workers=2, servers=0) as environment:
        monkeypatch.setenv(LINK, environment[LINK])
        assert link.worker_to_shard(1, 1) is None, "a shard beside its worker"
        beside = link.shard_to_worker(0, 1)
        assert beside and (beside._sender, beside._receiver) == (0, 1)
    monkeypatch.delenv(LINK)
    assert link.worker_to_shard(1, 0) is None
    with emulated(None, workers=2, servers=1) as environment:
        assert environment == {}


@pytest.mark.parametrize("over_tls", [False, True], ids=["plain", "tls"])
def test_a_job_is_as_slow_as_its_links(over_tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers push and pull a model of 40 kB five times over a server's link of 2 MB/s."""
    pytest.importorskip("torch")
    import numpy as np

    from paceline.lab.synthetic_worker import description
    from paceline.serve.worker.client import Client
    from train.jobs import job

    tls = None
    if over_tls:
        pytest.importorskip("trustme")
        from serve.tls_files import authority

        tls = authority(tmp_path, "ours")
    described = description(40_000)
    floor = 5 * 2 * 2 * 40_000 / 2e6

    def work(where: str) -> None:
        host, _, port = where.rpartition(":")
        client = Client((host, int(port)), described.as_json(), tls=tls)
        gradient, weights = (np.zeros(10_000, np.float32).data.cast("B") for _ in range(2))
        client.begin(weights)
        for _ in range(5):
            client.exchange(gradient, weights, batch_size=1, compute_seconds=0.0, rates=(0.1,))
        while not client.finish(weights):
            pass
        client.close()

    with emulated(2e6, workers=2, servers=1) as environment:
        monkeypatch.setenv(LINK, environment[LINK])
        with job("bsp", workers=2, tls=tls) as running:
            running.work(work, work)
            running.finish()
    times = [event.time for event in running.events]
    assert times[-1] - times[0] >= 0.95 * floor
