"""Connections of workers are cut, reset or mute after any number of bytes, with and without TLS.

The fault matrix (tests/faults) strikes at chosen messages, and so it must read them. Under TLS nobody can. Here a proxy
counts bytes instead. Every sample must still count exactly once.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("trustme")

from paceline.serve.environment import address
from paceline.serve.wire.tls import Tls
from paceline.serve.worker.client import Client
from serve.tls_files import authority
from serve.workers import described
from train.jobs import job
from tries import SEARCH

SIZE = 150_000  # elements of the model: a push is many chunks
SAMPLES, BATCH = 90, 5
CHUNK = 1 << 14
FAULTS = 6  # in a job
LEASE = 3.0


class Disturber:
    """Relays connections over TCP. Some of them are disturbed after a number of bytes in one direction."""

    def __init__(self, chance: random.Random, how: str) -> None:
        self._chance, self._how = chance, how
        self._create_connection = socket.create_connection
        self._lock = threading.Lock()
        self.faults = 0

    def connect(self, where: tuple[str, int], timeout: float | None = None, **_: object) -> socket.socket:
        """Open a connection through the relay, like `socket.create_connection`."""
        there = self._create_connection(where, timeout)
        there.settimeout(None)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            here = self._create_connection(listener.getsockname(), timeout)
            near, _ = listener.accept()
        with self._lock:
            last = [self._chance.randrange(2_000_000) if self._chance.random() < 0.5 else None for _ in range(2)]
        for source, target, limit in ((near, there, last[0]), (there, near, last[1])):
            threading.Thread(target=self._relay, args=(source, target, limit), daemon=True).start()
        return here

    def _relay(self, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        """Relay one direction, and disturb it when `limit` bytes have passed."""
        passed, mute = 0, False
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                passed += len(data)
                if limit is not None and passed > limit and not mute:
                    target.sendall(data[: limit - passed])
                    if self._strikes():
                        if self._how == "reset":
                            for each in (source, target):
                                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        if self._how != "mute":
                            break
                        mute = True
                        continue
                    data, limit = data[limit - passed :], None
                if not mute:
                    target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RD)  # wakes the other direction
            each.close()

    def _strikes(self) -> bool:
        """Count a fault. Return False if the job has had enough of them."""
        with self._lock:
            self.faults += self.faults < FAULTS
            return self.faults < FAULTS


def work(where: str, tls: Tls | None, is_reader: bool = False) -> float:
    """Add the number of samples to every element of the model, and return the last weight that was pulled."""
    weights, gradient = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    client = Client(address(where), described(SIZE), b"secret", tls=tls)
    try:
        client.begin(weights.data.cast("B"))
        while not is_reader and (count := (given := client.take(BATCH, SAMPLES, 1)).stop - given.start):
            gradient.fill(-count)
            client.exchange(
                gradient.data.cast("B"),
                weights.data.cast("B"),
                batch_size=count,
                compute_seconds=0.001,
                rates=(1.0,),
                taken=(given.number,),
            )
        assert weights.min() == weights.max()
        return float(weights[0])
    finally:
        client.close()


@pytest.fixture
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> Tls | None:
    return authority(tmp_path, "ours") if request.param else None


@pytest.mark.parametrize("seed", range(20 * SEARCH or 1))
@pytest.mark.parametrize("how", ["cut", "reset", pytest.param("mute", marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", ["r2sp", *(pytest.param(each, marks=pytest.mark.slow) for each in ("asp", "bsp"))])
@pytest.mark.parametrize("tls", [True, False], ids=["tls", "plain"], indirect=True)
def test_every_sample_counts_once(
    tls: Tls | None, policy: str, how: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturber = Disturber(random.Random(f"{policy} {how} {seed}"), how)
    with job(policy, shards=2, workers=3, token=b"secret", tls=tls, lease=LEASE) as running:
        monkeypatch.setattr(socket, "create_connection", disturber.connect)  # the shards are connected already
        running.work(*[lambda where: work(where, tls)] * 3)
        monkeypatch.undo()
        assert running.coordinator.samples is not None
        assert running.coordinator.samples.all_done
        assert running.work(lambda where: work(where, tls, is_reader=True)) == [SAMPLES]
    assert disturber.faults
