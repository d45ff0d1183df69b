"""The supervisor of a shard restarts it until the job is over, and tells the user why it cannot serve.

A script stands in for Python. It prints the lines by which a shard reports to its supervisor.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.launch import supervisor
from paceline.launch.processes import JobError
from paceline.launch.supervisor import Place, WorkerCommand, WorkerSupervisor
from paceline.serve.environment import JOINED, LOST, REFUSAL, REFUSED
from paceline.serve.restarts import RestartLimit


def kept(folder: Path, *starts: str, number: int | None = None, patience: float | None = None, **more: Any) -> str:
    """Run a shard that does these things, one after another, when it is started. Return the error, or nothing."""
    command, count = folder / "python", folder / "starts"
    cases = "\n".join(f"    case {index}: {start}" for index, start in enumerate(starts))
    command.write_text(
        f"#!{sys.executable}\nimport os, pathlib, signal, sys\ncount = pathlib.Path({str(count)!r})\n"
        "before = len(count.read_text()) if count.exists() else 0\ncount.write_text((before + 1) * '.')\n"
        f"def tell(line): os.write(2, f'\\r{{line}}\\n'.encode())\nmatch before:\n{cases}\n"
    )
    command.chmod(0o755)
    task = WorkerCommand((), "127.0.0.1:7000", b"", python=str(command), **{"workers": 0, **more})
    shards = WorkerSupervisor(task, RestartLimit(1), lambda *_, **__: None)
    try:
        asyncio.run(asyncio.wait_for(shards.keep_shard(number, patience=patience), 30))
    except JobError as error:
        return str(error)
    finally:
        assert len(count.read_text()) == len(starts), "it is started as often as it should be"
    return ""


@pytest.fixture(autouse=True)
def short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PAUSE", 0.0)


KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
ENDED = f"tell({JOINED!r}); sys.exit({LOST})"  # by a new generation
REFUSAL_OF_IT = f"tell({REFUSAL + 'No.'!r}); sys.exit({REFUSED})"


def test_a_shard_is_restarted_until_the_job_is_over(tmp_path: Path) -> None:
    assert kept(tmp_path, ENDED, KILLED, f"sys.exit({LOST})", ENDED, "sys.exit(0)") == ""


@pytest.mark.parametrize(
    ("number", "workers", "name"), [(None, 0, "Shard"), (3, 0, "Shard 3"), (3, 4, "The shard beside worker 3")]
)
def test_a_shard_that_is_refused_at_first_is_not_restarted(
    number: int | None, workers: int, name: str, tmp_path: Path
) -> None:
    assert kept(tmp_path, REFUSAL_OF_IT, number=number, workers=workers) == f"{name} is refused: No."


def test_a_shard_that_has_served_before_is_tried_again(tmp_path: Path) -> None:
    """A refusal may pass: the server may not know yet that the process before has ended."""
    assert kept(tmp_path, ENDED, REFUSAL_OF_IT, REFUSAL_OF_IT, "sys.exit(0)") == ""
    (tmp_path / "starts").unlink()
    error = kept(tmp_path, ENDED, *[REFUSAL_OF_IT] * 3, number=1)
    assert error == f"Shard 1 ended with exit code {REFUSED}, 3 times in a row. No."


def test_a_crash_is_quoted(tmp_path: Path) -> None:
    error = kept(tmp_path, *["sys.exit('the reason')"] * 3, number=1)
    assert error == "Shard 1 ended with exit code 1, 3 times in a row. Its last output:\n  the reason"


def test_a_shard_without_a_server_gives_up_in_time(tmp_path: Path) -> None:
    error = kept(tmp_path, f"sys.exit({LOST})", patience=0.0)
    assert error == "There is no server at 127.0.0.1:7000: start it, or correct its address."


def test_ssh_that_fails_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexit 255\n")
    ssh.chmod(0o755)
    (tmp_path / "starts").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    error = kept(tmp_path, number=1, workers=2, server_hosts=["c", "d"], shards=2)
    assert error == "ssh could not start shard 1 on d: try `ssh d`, or correct --server-hosts."


def test_shards_use_the_hosts_of_servers_in_turn() -> None:
    task = WorkerCommand((), "s:1", b"", hosts=["a", "b"], workers=2, server_hosts=["c", "d"], shards=3)
    places = [Place("c", 2), Place("d", 1), Place("c", 2)]
    assert [task.place_of_shard(number, 0) for number in range(3)] == places
    assert task.place_of_shard(0, replica=1).host == "d", "a backup runs on the next host"
    beside = WorkerCommand((), "s:1", b"", hosts=["a", "b"], workers=2)
    assert [beside.place_of_shard(number, 0).host for number in range(2)] == ["a", "b"]
