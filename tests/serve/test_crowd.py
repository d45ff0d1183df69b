"""Many workers at once: how many pushes a shard receives at a time, and how many files may be open."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("torch")

from paceline.policies import make
from paceline.serve import open_files
from paceline.serve.coordinator.config import ServerConfig
from paceline.serve.server import Server, ServerError
from paceline.serve.shard.admission import Admission
from paceline.serve.shard.shard import MIN_AT_ONCE, Shard
from paceline.serve.wire.frames import encode
from paceline.serve.wire.messages import AddToSum, DropUpdate, Identity, Push, PushReceived, UpdateReceived
from paceline.serve.wire.strangers import MAX_OF_ADDRESS
from serve.test_shard import Stage, Worker

SIZE = 1000  # elements
PATIENCE = 20.0


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage(SIZE)
    yield stage
    stage.close()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.001)


def has_admitted(shard: Shard, inside: int, waiting: int) -> bool:
    """Return whether the shard receives `inside` pushes, and `waiting` more wait for admission."""
    return (len(shard.receiving._inside), len(shard.receiving._queue)) == (inside, waiting)


def begin_push(worker: Worker, sent: int) -> None:
    """Send the head of a push, and the first `sent` elements."""
    body = np.ones(SIZE, dtype=np.float32).tobytes()
    worker.channel._socket.sendall(encode(Push(1, (1.0,)), len(body)) + body[: 4 * sent])


def end_push(worker: Worker, sent: int) -> None:
    """Send the other elements of a push, and wait for the answer."""
    worker.channel._socket.sendall(np.ones(SIZE - sent, dtype=np.float32).tobytes())
    assert worker.channel.receive() == PushReceived(1)


def test_a_limited_number_of_pushes_is_received_at_a_time_and_all_arrive(stage: Stage) -> None:
    (shard,) = stage.shards
    assert shard.receiving.slots > MIN_AT_ONCE, "the model is small, so there is room for many"
    shard.receiving.slots = 2
    workers = [stage.worker(number) for number in range(1, 5)]
    for number, worker in enumerate(workers):
        begin_push(worker, SIZE // 2)
        wait_until(lambda number=number: has_admitted(shard, min(2, number + 1), max(0, number - 1)))  # type: ignore[misc]
    for number, worker in enumerate(workers):
        end_push(worker, SIZE // 2)
        assert stage.hears() == UpdateReceived(Identity(number + 1, 1, 1))
    wait_until(lambda: has_admitted(shard, 0, 0))


def test_a_worker_that_hangs_up_during_a_push_makes_room(stage: Stage) -> None:
    (shard,) = stage.shards
    shard.receiving.slots = 1
    one, other = stage.worker(1), stage.worker(2)
    begin_push(one, 10)
    wait_until(lambda: has_admitted(shard, 1, 0))
    begin_push(other, 10)
    wait_until(lambda: has_admitted(shard, 1, 1))
    one.channel.close()
    end_push(other, 10)
    assert stage.hears() == UpdateReceived(Identity(2, 1, 1))


def test_where_updates_are_added_up_a_push_holds_its_slot_until_it_is_added(stage: Stage) -> None:
    (shard,) = stage.shards
    shard.receiving.slots = 1
    first, second, third, fourth = (stage.worker(number) for number in range(1, 5))
    assert first.push(1, 1.0) == PushReceived(1)
    stage.orders(AddToSum(Identity(1, 1, 1), 0, 1.0))  # from now on the shard knows that updates are added up
    wait_until(lambda: shard._adds)
    assert second.push(1, 1.0) == PushReceived(1)
    begin_push(third, SIZE)
    wait_until(lambda: has_admitted(shard, 1, 1))
    stage.orders(AddToSum(Identity(2, 1, 1), 0, 1.0))
    assert third.channel.receive() == PushReceived(1)
    begin_push(fourth, SIZE)
    wait_until(lambda: has_admitted(shard, 1, 1))
    stage.orders(DropUpdate(Identity(3, 1, 1)))  # a dropped update releases its slot, too
    assert fourth.channel.receive() == PushReceived(1)


def test_one_of_several_shards_does_not_hold_slots_until_updates_are_added() -> None:
    """Two shards whose slots are held by different updates would wait for each other."""
    stage = Stage(SIZE, pieces=((0, SIZE // 2),))
    try:
        assert not stage.shards[0]._alone
    finally:
        stage.close()


def test_a_fixed_number_of_slots_does_not_change_and_all_are_admitted() -> None:
    admission, entered = Admission(3, stuck=PATIENCE, adapts=False), list[int]()

    def transfer(number: int) -> None:
        admitted = admission.enter()
        entered.append(number)
        admitted.moved(1)
        admitted.leave()

    inside = [admission.enter() for _ in range(3)]
    threads = []
    for number in range(200):
        threads.append(threading.Thread(target=transfer, args=(number,), daemon=True))
        threads[-1].start()
        wait_until(lambda number=number: len(admission._queue) == number + 1)  # type: ignore[misc]
    assert not entered
    inside[0].leave()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(entered) == list(range(200))
    assert admission.slots == 3


def test_many_workers_that_connect_at_once_are_all_served(stage: Stage) -> None:
    """They share an address and are more than its quota. Each ends its handshake in time, so none is disconnected."""
    count = MAX_OF_ADDRESS + 64
    with ThreadPoolExecutor(count) as threads:
        workers = list(threads.map(stage.worker, range(1, count + 1)))
    assert workers[-1].push(1, 1.0) == PushReceived(1)


def test_the_limit_of_open_files_is_raised_as_far_as_the_system_allows() -> None:
    code = (
        "import resource; from paceline.serve import open_files as files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (600, 2000))\n"
        "assert files.allow(10) == 10 and resource.getrlimit(resource.RLIMIT_NOFILE) == (600, 2000)\n"
        "assert files.allow(500) == 500\n"
        "wanted = 500 + files.SPARE_FILES + files.MAX_STRANGERS\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, 2000)\n"
        "assert files.allow(1900) == 1900, 'strangers make room for workers'\n"
        "assert files.allow(5000) == 2000 - files.SPARE_FILES\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_server_that_may_not_open_enough_files_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "allow", lambda _connections: 960)
    with pytest.raises(ServerError, match=r"5000 workers need as many open files, but the system allows 960: raise"):
        Server(lambda: make("asp"), ServerConfig(workers=5000))
