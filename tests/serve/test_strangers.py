"""Strangers at the door: which connections are closed to make room, and how long a worker takes to join beside them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from paceline.serve.wire.strangers import GRACE_SECONDS, Strangers, group_of
from paceline.serve.wire.tls import Tls
from serve.test_hostile import DESCRIPTION, PATIENCE, SIZE, TOKEN
from serve.tls_files import authority
from train.jobs import Job, job

# The rules


def test_there_is_room_for_newcomers_until_an_address_has_its_quota() -> None:
    strangers = Strangers[int](total=10, of_address=3)
    assert [strangers.enter(key, "a", 0.0) for key in range(3)] == [[], [], []]
    assert strangers.enter(3, "b", 1.0) == []
    assert strangers.enter(4, "a", 1.0) == [0], "the oldest of that address goes"
    assert len(strangers) == 4


def test_a_peer_that_has_proved_to_know_the_token_takes_no_room() -> None:
    strangers = Strangers[int](total=10, of_address=2)
    strangers.enter(0, "a", 0.0)
    strangers.enter(1, "a", 0.0)
    strangers.leave(0)
    strangers.leave(0)  # again, when its connection ends
    assert strangers.enter(2, "a", 1.0) == []
    assert strangers.enter(3, "a", 1.0) == [1]


def test_the_address_with_the_most_strangers_makes_room() -> None:
    strangers = Strangers[str](total=4, of_address=4)
    for key in ("lone", "many1", "many2", "many3"):
        strangers.enter(key, key.rstrip("123"), 0.0)
    assert strangers.enter("other", "elsewhere", 1.0) == ["many1"]
    assert len(strangers) == 4


def test_nobody_is_displaced_within_the_grace_and_the_total_stays_bounded() -> None:
    strangers = Strangers[int](total=4, of_address=2)
    for key in range(4):
        assert strangers.pause(0.0) == 0.0
        assert strangers.enter(key, "a", 0.0) == [], "a crowd of honest workers may come from one address"
    assert strangers.pause(0.1) == pytest.approx(GRACE_SECONDS - 0.1)
    assert strangers.pause(GRACE_SECONDS) == 0.0
    assert strangers.enter(4, "a", GRACE_SECONDS) == [0, 1, 2]


def test_if_the_system_has_no_room_the_oldest_of_the_largest_address_goes() -> None:
    strangers = Strangers[int](total=10, of_address=10)
    assert strangers.displace() is None
    for key, address in enumerate("abb"):
        strangers.enter(key, address, 0.0)
    assert strangers.displace() == 1
    assert len(strangers) == 2


ARRIVALS = st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 0.4)), max_size=60)


@given(ARRIVALS, st.integers(1, 8), st.integers(1, 8))
def test_the_total_is_bounded_and_a_newcomer_is_never_refused(
    newcomers: list[tuple[str, float]], total: int, of_address: int
) -> None:
    strangers, now, inside = Strangers[int](total, of_address), 0.0, dict[int, float]()
    for key, (address, after) in enumerate(newcomers):
        now += after
        while pause := strangers.pause(now):
            now += max(pause, 1e-6)
        inside[key] = now
        for displaced in strangers.enter(key, address, now):
            assert displaced != key
            assert now - inside.pop(displaced) >= GRACE_SECONDS - 1e-9
        assert len(strangers) == len(inside) <= total


@pytest.mark.parametrize(
    ("address", "group"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_the_addresses_that_one_host_may_choose_count_as_one(address: str, group: str) -> None:
    assert group_of(address) == group


# A running job


class Attack:
    """Silent and slow connections to some ports: two bursts, and then some more each second."""

    BURST, EACH_SECOND = 500, 20

    def __init__(self, ports: list[int]) -> None:
        self._ports, self._sockets = ports, list[socket.socket]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def __enter__(self) -> Attack:
        for port in self._ports:
            self._open(port, self.BURST)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)
        for sock in self._sockets:
            sock.close()

    def burst(self) -> None:
        """Open many connections at once."""
        for port in self._ports:
            self._open(port, self.BURST)

    def _open(self, port: int, count: int) -> list[socket.socket]:
        opened = []
        for _ in range(count):
            sock = socket.socket()
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.connect(("127.0.0.1", port))
            opened.append(sock)
        self._sockets += opened
        return opened

    def _go_on(self) -> None:
        slow: list[socket.socket] = []
        while not self._stop.wait(1.0):
            for sock in slow:
                with contextlib.suppress(OSError):
                    sock.send(b"p")
            for port in self._ports:
                self._open(port, self.EACH_SECOND)
                slow += self._open(port, self.EACH_SECOND)


@contextlib.contextmanager
def attacked(running: Job) -> Iterator[Attack]:
    ports = [port for _, port in running.coordinator.shards.addresses]
    with Attack([int(running.address.rpartition(":")[2]), *ports]) as attack:
        yield attack


def joins(running: Job, number: int, tls: Tls | None = None) -> float:
    """Let a worker join, make an update and leave. Return the seconds until the update was applied."""
    from paceline.serve.worker.client import Client

    host, _, port = running.address.rpartition(":")
    weights, gradient = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    began = time.monotonic()
    client = Client((host, int(port)), DESCRIPTION, TOKEN, number, tls=tls)
    client.begin(weights.data.cast("B"))
    client.exchange(gradient.data.cast("B"), weights.data.cast("B"), batch_size=1, rates=[1.0])
    seconds = time.monotonic() - began
    client.close()
    return seconds


@pytest.mark.alone
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_a_worker_joins_a_job_that_strangers_attack(encrypted: bool, tmp_path: Path) -> None:
    """Before strangers made room for each other, it took 30 s and more."""
    tls = authority(tmp_path, "ours") if encrypted else None
    with job("asp", shards=2, token=TOKEN, shard_token=b"shards", tls=tls) as running:
        joins(running, 0, tls)
        with attacked(running) as attack:
            assert joins(running, 1, tls) < 20.0  # a second or less on a machine that does nothing else
            attack.burst()
            assert joins(running, 2, tls) < 20.0


@pytest.mark.alone
def test_strangers_get_no_threads() -> None:
    with job("asp", shards=2, token=TOKEN, shard_token=b"shards") as running:
        joins(running, 0)
        before = threading.active_count()
        with attacked(running):
            joins(running, 1)
            assert threading.active_count() <= before + 8
