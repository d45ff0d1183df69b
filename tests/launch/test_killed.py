"""If the process of the server or of a shard is killed under `paceline run`, the job continues and finishes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from paceline.model import checkpoint

#: Worker 0 kills the process of the server or of a shard once: during training, or at its end.
KILLS = """
import os, pathlib, signal, sys, time
import torch
import paceline
from paceline.model.optimizer import without_compiler

without_compiler()  # importing torch's compiler takes two seconds in each process
mark, target, when, folder = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3], pathlib.Path(sys.argv[4])
damages = sys.argv[5:] == ["damaged"]


def children(pid):
    return [int(each) for each in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill():
    if session.worker != 0 or mark.exists():
        return
    mark.touch()
    while not list(folder.glob("version-*[0-9]")):
        time.sleep(0.01)
    if damages:  # the newest of two checkpoints, once no other one is being written
        while len(found := sorted(folder.glob("version-*"))) != 2 or any(each.suffix for each in found):
            time.sleep(0.01)
        os.truncate(found[-1] / "shard-1.safetensors", 100)
    commands = {pid: pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(os.getppid())}
    if target == "colocated":
        first, is_primary = b"serve.shard\\0" b"0\\0", b"--replica\\0" b"0\\0"
        beside = [pid for pid, command in commands.items() if first in command and command.endswith(is_primary)]
        os.kill(beside[0], signal.SIGKILL)
        return
    server = next(pid for pid, command in commands.items() if b"serve" in command)
    shard = children(children(server)[0])[0]  # a child of the fork server
    os.kill(server if target == "server" else shard, signal.SIGKILL)


torch.manual_seed(0)
x, y = torch.randn(240, 6), torch.randint(0, 3, (240,))
model = torch.nn.Linear(6, 3)
session = paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1))
steps = 0
for a, b in session.batches(torch.utils.data.TensorDataset(x, y), batch_size=8, epochs=4):
    torch.nn.functional.cross_entropy(model(a), b).backward()
    steps += 1
    if when == "training" and steps == (25 if damages else 5):
        kill()
    session.step()
if when == "end":
    kill()
session.close()
"""

MORE = [pytest.param(target, "training", marks=pytest.mark.matrix) for target in ("server", "shard")]


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.parametrize(("target", "when"), [("server", "end"), *MORE])
def test_a_killed_server_is_restarted_and_every_sample_counts(tmp_path: Path, target: str, when: str) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "checkpoints"
    script.write_text(KILLS)
    workers = "1" if when == "end" else "2"
    command = ["run", "--workers", workers, "--servers", "2", "-p", "asp", "--lease", "5"]
    command += ["--checkpoint", str(folder), "--checkpoint-every", "10"]
    command += [str(script), str(tmp_path / "mark"), target, when, str(folder)]
    ran = subprocess.run(
        [sys.executable, "-m", "paceline", *command],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ("restarting it" if target == "server" else "Going back to version") in ran.stderr
    samples = checkpoint.read(folder).job["samples"]
    assert (samples["trained"], samples["open"]) == (4 * 240, [])


@pytest.mark.slow
@pytest.mark.parametrize("target", ["server", pytest.param("shard", marks=pytest.mark.matrix)])
def test_a_killed_server_goes_back_to_the_newest_whole_checkpoint(tmp_path: Path, target: str) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "checkpoints"
    script.write_text(KILLS)
    command = ["run", "--workers", "1", "--servers", "2", "-p", "asp", "--lease", "5"]
    command += ["--checkpoint", str(folder), "--checkpoint-every", "10"]
    command += [str(script), str(tmp_path / "mark"), target, "training", str(folder), "damaged"]
    ran = subprocess.run(
        [sys.executable, "-m", "paceline", *command],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    (damaged,) = folder.glob("*.damaged")
    said = f"{damaged.stem} is damaged: shard-1.safetensors has 100 bytes instead of "
    assert ran.stderr.count(said) == 1, ran.stderr
    assert "; going back to version " in ran.stderr
    samples = checkpoint.read(folder).job["samples"]
    assert (samples["trained"], samples["open"]) == (4 * 240, [])


@pytest.mark.slow
@pytest.mark.parametrize("target", ["shard", pytest.param("colocated", marks=pytest.mark.matrix)])
def test_the_backup_of_a_killed_shard_takes_over(tmp_path: Path, target: str) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "checkpoints"
    script.write_text(KILLS)
    place = ["--colocate"] if target == "colocated" else ["--servers", "2"]
    command = ["run", "--workers", "2", *place, "--replicas", "1", "-p", "asp", "--lease", "5"]
    command += ["--checkpoint", str(folder), "--checkpoint-every", "10"]
    command += [str(script), str(tmp_path / "mark"), target, "training", str(folder)]
    ran = subprocess.run(
        [sys.executable, "-m", "paceline", *command],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Its backup takes over" in ran.stderr
    assert "Going back to version" not in ran.stderr
    samples = checkpoint.read(folder).job["samples"]
    assert (samples["trained"], samples["open"]) == (4 * 240, [])
