"""The fork server: its shards end like processes started on their own, and no shard outlives the fork server."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from paceline.serve.environment import LOST
from paceline.serve.shard import forkserver
from paceline.serve.shard.forkserver import ForkedShard, ForkServer
from paceline.serve.wire import endpoint

pytestmark = pytest.mark.skipif(not forkserver.IS_SUPPORTED, reason="fork servers need Linux")
LIMIT = 60.0  # seconds that any wait may take


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    """One fork server for all tests that leave it running."""
    forks = ForkServer(os.environ)
    yield forks
    forks.close()


@pytest.fixture
def coordinator() -> Iterator[socket.socket]:
    """A listener that accepts shards and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT)
        yield listener


def hanging_shard(forks: ForkServer, coordinator: socket.socket, number: int = 0) -> tuple[ForkedShard, socket.socket]:
    """Start a shard that waits for the coordinator's answer. Return it, and its connection."""
    shard = forks.start([str(number), "127.0.0.1", str(coordinator.getsockname()[1])])
    return shard, coordinator.accept()[0]


def children_named(name: str, parent: int) -> list[int]:
    """Return the ids of the processes with this name that `parent` has forked."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in children if Path(f"/proc/{child}/comm").read_text().strip() == name]


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.core
def test_the_exit_code_of_a_shard_is_reported(forks: ForkServer, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed_port = str(listener.getsockname()[1])
    lonely, wrong = forks.start(["0", "127.0.0.1", closed_port]), forks.start(["0", "127.0.0.1"])
    assert lonely.wait(LIMIT) == lonely.poll() == lonely.returncode == LOST, "the server may come back"
    assert wrong.wait(LIMIT) == 2, "an argument is missing"


def test_a_shard_that_runs_has_no_exit_code_until_it_is_killed(forks: ForkServer, coordinator: socket.socket) -> None:
    shard, connection = hanging_shard(forks, coordinator)
    with connection:
        assert shard.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            shard.wait(0.01)
        shard.kill()
        assert shard.wait(LIMIT) == -9


def test_a_shard_has_its_own_session_and_name(forks: ForkServer, coordinator: socket.socket) -> None:
    shard, connection = hanging_shard(forks, coordinator, number=7)
    with connection:
        (pid,) = children_named("shard 7", forks._process.pid)
        assert os.getsid(pid) == pid
        os.kill(pid, 15)
        assert shard.wait(LIMIT) == -15


def test_the_fork_server_has_one_thread(forks: ForkServer) -> None:
    forks.start(["0", "127.0.0.1"]).wait(LIMIT)
    assert len(os.listdir(f"/proc/{forks._process.pid}/task")) == 1


@pytest.mark.slow
def test_shards_die_with_the_fork_server(coordinator: socket.socket) -> None:
    forks = ForkServer(os.environ)
    shard, connection = hanging_shard(forks, coordinator)
    with connection:
        (pid,) = children_named("shard 0", forks._process.pid)
        forks._process.kill()
        assert shard.wait(LIMIT) == -9
        assert forks.ended
        end = time.monotonic() + endpoint.SECONDS / 2  # less than the shard's own timeout
        while not has_ended(pid):
            assert time.monotonic() < end, "the shard outlived the fork server"
            time.sleep(0.01)
    assert forks.start(["0", "127.0.0.1", "1"]).poll() == -9, "a shard that cannot be started is reported"
    forks.close()


def test_a_shard_can_be_killed_before_torch_is_loaded() -> None:
    forks = ForkServer(os.environ)
    shard = forks.start(["0", "127.0.0.1", "1"])
    shard.kill()
    assert shard.wait(LIMIT) == -9
    forks.close()


@pytest.mark.slow
def test_the_fork_server_ends_after_its_shards_when_the_server_is_gone(coordinator: socket.socket) -> None:
    forks = ForkServer(os.environ)
    _, connection = hanging_shard(forks, coordinator)
    (pid,) = children_named("shard 0", forks._process.pid)
    forks._socket.close()
    with pytest.raises(subprocess.TimeoutExpired):
        forks._process.wait(0.1)
    assert not has_ended(pid)
    connection.close()  # the shard notices this and ends
    assert forks._process.wait(LIMIT) == 0
    assert has_ended(pid)
