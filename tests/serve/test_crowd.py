"""A crowd of workers: how many pushes are received at a time, and how many files may be open."""

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
from paceline.serve.shard.worker_listener import STRANGERS
from paceline.serve.wire.frames import encode
from paceline.serve.wire.messages import AddToSum, DropUpdate, Identity, Push, PushReceived, UpdateReceived
from serve.test_shard import Stage, Worker

SIZE = 1000  # elements
PATIENCE = 20.0


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage(SIZE)
    yield stage
    stage.close()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.001)


def stands(shard: Shard, inside: int, waiting: int) -> bool:
    return (len(shard.receiving._inside), len(shard.receiving._queue)) == (inside, waiting)


def begins(worker: Worker, sent: int) -> None:
    """It announces a push, and sends so many elements of it."""
    body = np.ones(SIZE, dtype=np.float32).tobytes()
    worker.channel._socket.sendall(encode(Push(1, (1.0,)), len(body)) + body[: 4 * sent])


def ends(worker: Worker, sent: int) -> None:
    worker.channel._socket.sendall(np.ones(SIZE - sent, dtype=np.float32).tobytes())
    assert worker.channel.receive() == PushReceived(1)


def test_only_so_many_pushes_are_received_at_a_time_and_all_get_through(stage: Stage) -> None:
    (shard,) = stage.shards
    assert shard.receiving.slots > MIN_AT_ONCE, "a small model: there is room for many"
    shard.receiving.slots = 2
    workers = [stage.worker(number) for number in range(1, 5)]
    for number, worker in enumerate(workers):
        begins(worker, SIZE // 2)
        until(lambda number=number: stands(shard, min(2, number + 1), max(0, number - 1)))  # type: ignore[misc]
    for number, worker in enumerate(workers):
        ends(worker, SIZE // 2)
        assert stage.hears() == UpdateReceived(Identity(number + 1, 1, 1))
    until(lambda: stands(shard, 0, 0))


def test_who_hangs_up_in_the_midst_of_a_push_makes_room(stage: Stage) -> None:
    (shard,) = stage.shards
    shard.receiving.slots = 1
    one, other = stage.worker(1), stage.worker(2)
    begins(one, 10)
    until(lambda: stands(shard, 1, 0))
    begins(other, 10)
    until(lambda: stands(shard, 1, 1))
    one.channel.close()
    ends(other, 10)
    assert stage.hears() == UpdateReceived(Identity(2, 1, 1))


def test_where_updates_are_added_up_one_has_its_place_until_it_is(stage: Stage) -> None:
    (shard,) = stage.shards
    shard.receiving.slots = 1
    first, second, third, fourth = (stage.worker(number) for number in range(1, 5))
    assert first.push(1, 1.0) == PushReceived(1)
    stage.orders(AddToSum(Identity(1, 1, 1), 0, 1.0))  # from now on it is known that they are
    until(lambda: shard._adds)
    assert second.push(1, 1.0) == PushReceived(1)
    begins(third, SIZE)
    until(lambda: stands(shard, 1, 1))
    stage.orders(AddToSum(Identity(2, 1, 1), 0, 1.0))
    assert third.channel.receive() == PushReceived(1)
    begins(fourth, SIZE)
    until(lambda: stands(shard, 1, 1))
    stage.orders(DropUpdate(Identity(3, 1, 1)))  # dropped, it has none either
    assert fourth.channel.receive() == PushReceived(1)


def test_one_of_several_shards_waits_for_none_to_be_added() -> None:
    """Two shards full of different pushes would wait for one another."""
    stage = Stage(SIZE, pieces=((0, SIZE // 2),))
    try:
        assert not stage.shards[0]._alone
    finally:
        stage.close()


def test_a_fixed_number_stays_what_it_is_and_wakes_one_after_the_other() -> None:
    admission, entered = Admission(3, stuck=PATIENCE, adapts=False), list[int]()

    def through(number: int) -> None:
        entering = admission.enter()
        entered.append(number)
        entering.moved(1)
        entering.leave()

    inside = [admission.enter() for _ in range(3)]
    threads = []
    for number in range(200):
        threads.append(threading.Thread(target=through, args=(number,), daemon=True))
        threads[-1].start()
        until(lambda number=number: len(admission._queue) == number + 1)  # type: ignore[misc]
    assert not entered
    inside[0].leave()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(entered) == list(range(200))
    assert admission.slots == 3


def test_a_crowd_that_calls_at_once_is_let_in(stage: Stage) -> None:
    """More than may be in the midst of their greeting: they wait for a moment, and nobody is hung up on."""
    crowd = 3 * STRANGERS
    with ThreadPoolExecutor(crowd) as threads:
        workers = list(threads.map(stage.worker, range(1, crowd + 1)))
    assert workers[-1].push(1, 1.0) == PushReceived(1)


def test_as_many_files_are_allowed_as_the_system_lets_us() -> None:
    code = (
        "import resource; from paceline.serve import open_files as files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 1000))\n"
        "assert files.allow(10) == 10 and resource.getrlimit(resource.RLIMIT_NOFILE) == (100, 1000)\n"
        "assert files.allow(500) == 500 and resource.getrlimit(resource.RLIMIT_NOFILE) == (500 + files.SPARE, 1000)\n"
        "assert files.allow(5000) == 1000 - files.SPARE\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_server_that_could_not_hold_its_workers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "allow", lambda _connections: 960)
    with pytest.raises(ServerError, match=r"5000 workers need as many open files, and there may be 960: raise"):
        Server(lambda: make("asp"), ServerConfig(workers=5000))
