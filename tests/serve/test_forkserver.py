"""The fork server: its shards end as processes of their own would, and none outlives what it belongs to."""

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

from paceline.serve.shard import forkserver
from paceline.serve.shard.forkserver import ForkedShard, ForkServer
from paceline.serve.wire import endpoint

pytestmark = pytest.mark.skipif(not forkserver.POSSIBLE, reason="fork servers need Linux")
LIMIT = 60.0  # seconds that anything may take


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    """One for all tests that leave it as it was."""
    made = ForkServer(os.environ)
    yield made
    made.close()


@pytest.fixture
def coordinator() -> Iterator[socket.socket]:
    """A listener that accepts shards, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT)
        yield listener


def hangs(forks: ForkServer, coordinator: socket.socket, number: int = 0) -> tuple[ForkedShard, socket.socket]:
    """A shard that waits for an answer, and its connection."""
    shard = forks.start([str(number), "127.0.0.1", str(coordinator.getsockname()[1])])
    return shard, coordinator.accept()[0]


def named(name: str, parent: int) -> list[int]:
    """The processes of that name that the process has forked."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in children if Path(f"/proc/{child}/comm").read_text().strip() == name]


def is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_an_exit_code_is_that_of_the_shard(forks: ForkServer, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = str(listener.getsockname()[1])
    gone, wrong = forks.start(["0", "127.0.0.1", nobody]), forks.start(["0", "127.0.0.1"])
    assert gone.wait(LIMIT) == gone.poll() == gone.returncode == 0, "without a server there is nothing to do"
    assert wrong.wait(LIMIT) == 2


def test_a_shard_that_runs_has_no_exit_code_until_it_is_killed(forks: ForkServer, coordinator: socket.socket) -> None:
    shard, connection = hangs(forks, coordinator)
    with connection:
        assert shard.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            shard.wait(0.01)
        shard.kill()
        assert shard.wait(LIMIT) == -9


def test_a_shard_has_a_session_and_a_name_of_its_own(forks: ForkServer, coordinator: socket.socket) -> None:
    shard, connection = hangs(forks, coordinator, number=7)
    with connection:
        (process,) = named("shard 7", forks._process.pid)
        assert os.getsid(process) == process
        os.kill(process, 15)
        assert shard.wait(LIMIT) == -15


def test_it_starts_no_thread_before_it_forks(forks: ForkServer) -> None:
    forks.start(["0", "127.0.0.1"]).wait(LIMIT)
    assert len(os.listdir(f"/proc/{forks._process.pid}/task")) == 1


def test_shards_die_with_the_fork_server(coordinator: socket.socket) -> None:
    forks = ForkServer(os.environ)
    shard, connection = hangs(forks, coordinator)
    with connection:
        (process,) = named("shard 0", forks._process.pid)
        forks._process.kill()
        assert shard.wait(LIMIT) == -9
        assert forks.ended
        end = time.monotonic() + endpoint.SECONDS / 2  # after that long it would give up by itself
        while not is_gone(process):
            assert time.monotonic() < end, "the shard has outlived the fork server"
            time.sleep(0.01)
    assert forks.start(["0", "127.0.0.1", "1"]).poll() == -9, "nobody starts it, and that is not hidden"
    forks.close()


def test_before_torch_is_loaded_a_shard_is_killed_at_once() -> None:
    forks = ForkServer(os.environ)
    shard = forks.start(["0", "127.0.0.1", "1"])
    shard.kill()
    assert shard.wait(LIMIT) == -9
    forks.close()


def test_it_ends_after_its_shards_when_the_server_is_gone(coordinator: socket.socket) -> None:
    forks = ForkServer(os.environ)
    _, connection = hangs(forks, coordinator)
    (process,) = named("shard 0", forks._process.pid)
    forks._link.close()
    with pytest.raises(subprocess.TimeoutExpired):
        forks._process.wait(0.1)
    assert not is_gone(process)
    connection.close()  # which the shard notices
    assert forks._process.wait(LIMIT) == 0
    assert is_gone(process)
