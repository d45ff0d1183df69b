"""Faults during recovery: a process that was restarted is killed again, at each step of its start.

`paceline run` restarts the process while --restarts lasts, and every sample counts once.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from launch.strikes import strikes, struck
from launch.test_killed import KILLS
from paceline.launch import server_process
from paceline.launch.processes import JobError
from paceline.launch.server_process import ServerProcess
from paceline.model import checkpoint
from paceline.model.description import Description
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan
from paceline.serve.job_options import JobOptions
from paceline.serve.restarts import RestartLimit

SERVER, FORKS, WORKER = "paceline.serve", "paceline.serve.shard.forkserver", "train.py"
LISTENS = "paceline.serve.coordinator.coordinator:Coordinator.listen"
READS = "paceline.model.checkpoint:read"


def run_struck(
    tmp_path: Path, *specs: str, restarts: str = "3", target: str = "server"
) -> subprocess.CompletedProcess[str]:
    """Run a job in which worker 0 kills the server or a shard during training, and then these strikes follow."""
    script, folder = tmp_path / "train.py", tmp_path / "checkpoints"
    script.write_text(KILLS)
    command = ["run", "--workers", "2", "--servers", "2", "-p", "asp", "--lease", "5", "--restarts", restarts]
    command += ["--checkpoint", str(folder), "--checkpoint-every", "10"]
    command += [str(script), str(tmp_path / "mark"), target, "training", str(folder)]
    return subprocess.run(
        [sys.executable, "-m", "paceline", *command],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | strikes(tmp_path, *specs),
    )


def check(ran: subprocess.CompletedProcess[str], tmp_path: Path, count: int) -> None:
    """Assert that the job has ended well after this number of strikes, and that every sample counted once per epoch."""
    assert struck(tmp_path) == count
    assert ran.returncode == 0, ran.stderr
    samples = checkpoint.read(tmp_path / "checkpoints").job["samples"]
    assert (samples["trained"], samples["open"]) == (4 * 240, [])


MATRIX = pytest.mark.matrix


@pytest.mark.slow
@pytest.mark.parametrize(
    "specs",
    [
        (f"{SERVER}/2/at-once", f"{SERVER}/3/before-{READS}"),
        pytest.param((f"{SERVER}/2/before-{LISTENS}",), marks=MATRIX),
        pytest.param((f"{SERVER}/2/after-{LISTENS}",), marks=MATRIX),
        pytest.param((f"{SERVER}/2/before-paceline.serve.server:Server.serve",), marks=MATRIX),
        pytest.param(
            (f"{SERVER}/2/before-paceline.serve.coordinator.coordinator:Coordinator._send_welcome",), marks=MATRIX
        ),
        pytest.param((f"{FORKS}/2/at-once",), marks=MATRIX),
        pytest.param((f"{FORKS}/2/before-paceline.serve.shard.shard:load_pieces",), marks=MATRIX),
        pytest.param((f"{SERVER}/2/after-{LISTENS}", f"{FORKS}/2/at-once"), marks=MATRIX),
    ],
    ids=lambda specs: "+".join(spec.replace("paceline.", "") for spec in specs),
)
def test_a_server_is_killed_again_while_it_restarts(specs: tuple[str, ...], tmp_path: Path) -> None:
    check(run_struck(tmp_path, *specs), tmp_path, len(specs))


LOADS = f"{FORKS}/1/before-paceline.serve.shard.shard:load_pieces"


@MATRIX
@pytest.mark.slow
@pytest.mark.parametrize("restarts", ["1", "2"])
def test_a_shard_is_killed_while_the_new_generation_loads(restarts: str, tmp_path: Path) -> None:
    ran = run_struck(tmp_path, LOADS, target="shard", restarts=restarts)
    if restarts == "2":
        check(ran, tmp_path, 1)
        return
    assert ran.returncode == 1
    told = "Shards were restarted once before; allow more with --restarts, and continue the job with --resume "
    assert told in " ".join(ran.stderr.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        f"{SERVER}/1/before-paceline.serve.server:Server.serve",  # it has said that it listens
        pytest.param(f"{SERVER}/1/at-once", marks=MATRIX),
        pytest.param(f"{SERVER}/1/after-{LISTENS}", marks=MATRIX),
        pytest.param(f"{FORKS}/1/at-once", marks=MATRIX),
        pytest.param(f"{WORKER}/1/at-once", marks=MATRIX),
        pytest.param(f"{WORKER}/2/before-paceline.serve.worker.client:Client._join", marks=MATRIX),
        pytest.param(f"{WORKER}/1/after-paceline.serve.worker.client:Client._join", marks=MATRIX),
        pytest.param(f"{WORKER}/1/after-paceline.serve.worker.client:Client._join_again", marks=MATRIX),
        pytest.param(f"{WORKER}/1/before-paceline.serve.worker.incarnation:Incarnation._reconnect", marks=MATRIX),
    ],
)
def test_a_process_is_killed_during_its_first_start_or_while_it_returns(spec: str, tmp_path: Path) -> None:
    check(run_struck(tmp_path, spec), tmp_path, 1)


@pytest.mark.slow
def test_a_server_that_is_killed_too_often_ends_the_job_with_what_to_do(tmp_path: Path) -> None:
    ran = run_struck(tmp_path, *(f"{SERVER}/{start}/at-once" for start in (2, 3)), restarts="2/10m")
    assert ran.returncode == 1
    told = (
        "The server was killed by SIGKILL after it was restarted 2 times within 10 minutes; allow more restarts with "
        f"--restarts, and continue the job with --resume {tmp_path / 'checkpoints'}."
    )
    assert told.replace(" ", "") in "".join(ran.stderr.split())


class Started:
    """A server process of a job that nobody joins, and the lines that it shows."""

    def __init__(self, folder: Path, *specs: str, restarts: int = 3, shards: int = 0) -> None:
        self.lines: list[str] = []
        saving = CheckpointPlan(folder / "checkpoints", updates=10)
        options = JobOptions(policy="bsp", shards=shards, saving=saving, restarts=RestartLimit(restarts))
        self.server = ServerProcess(options, b"a token of this job", self.say, strikes(folder, *specs))

    def say(self, line: str, *, aside: bool, source: str = "", stays: bool = True) -> None:
        self.lines.append(line)

    def start(self) -> str:
        """Start and stop the server. Return the error, or an empty string."""

        async def start() -> None:
            try:
                await self.server.start()
            finally:
                await self.server.stop()

        try:
            asyncio.run(start())
        except JobError as error:
            return str(error)
        return ""


@pytest.mark.slow
def test_a_server_that_is_killed_before_it_has_listened_is_started_again(tmp_path: Path) -> None:
    started = Started(tmp_path, f"{SERVER}/1/at-once", f"{SERVER}/2/before-{LISTENS}")
    assert started.start() == ""
    assert started.server.port
    assert started.lines[:2] == ["The server was killed by SIGKILL; starting it again."] * 2


def test_a_server_that_never_starts_ends_with_a_sentence(tmp_path: Path) -> None:
    started = Started(tmp_path, *(f"{SERVER}/{start}/at-once" for start in (1, 2, 3)), restarts=2)
    end = "after it was restarted 2 times; allow more restarts with --restarts."
    assert started.start() == f"The server was killed by SIGKILL {end}"


def test_a_server_that_hangs_before_it_listens_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Started(tmp_path)
    monkeypatch.setattr(server_process, "START_SECONDS", 0.0)

    def say(line: str, **_: object) -> None:
        started.lines.append(line)
        monkeypatch.setattr(server_process, "START_SECONDS", 60.0)

    started.server._say = say
    assert started.start() == ""
    assert started.lines[0] == "The server did not listen within 0 s; starting it again."


def test_the_checkpoints_of_another_run_are_not_taken_for_its_own(tmp_path: Path) -> None:
    """A server that was killed before it had looked at the folder must refuse it after its restart."""
    described = Description(Layout((Tensor("w", (2,)),)), OptimizerSpec("SGD", ({"lr": 1.0},)))
    part = checkpoint.part_of(tmp_path / "checkpoints", 7)
    part.mkdir(parents=True)
    saved = checkpoint.save_shard(part, 0, {}, {})
    job = {"version": 7, "shards": 1, "parts": [saved], "description": json.loads(described.as_json())}
    checkpoint.finish(part, job)
    started = Started(tmp_path, f"{SERVER}/1/at-once", shards=1)
    assert "has checkpoints of an earlier run" in started.start()
