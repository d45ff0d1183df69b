"""The server's process, or a shard's, killed under a real `paceline run`: the job goes on and finishes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from paceline.model import checkpoint

#: Worker 0 kills the server's process, or a shard's, once: in the midst of training, or when it is over.
KILLS = """
import os, pathlib, signal, sys, time
import torch
import paceline
from paceline.model.optimizer import without_compiler

without_compiler()  # nobody compiles here, and to import it takes each process two seconds
mark, whom, when, folder = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3], pathlib.Path(sys.argv[4])


def children(pid):
    return [int(each) for each in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill():
    if session.worker != 0 or mark.exists():
        return
    mark.touch()
    while not list(folder.glob("version-*[0-9]")):
        time.sleep(0.01)
    commands = {pid: pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(os.getppid())}
    server = next(pid for pid, command in commands.items() if b"serve" in command)
    os.kill(server if whom == "server" else children(children(server)[0])[0], signal.SIGKILL)  # of the fork server


torch.manual_seed(0)
x, y = torch.randn(240, 6), torch.randint(0, 3, (240,))
model = torch.nn.Linear(6, 3)
session = paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1))
steps = 0
for a, b in session.batches(torch.utils.data.TensorDataset(x, y), batch_size=8, epochs=4):
    torch.nn.functional.cross_entropy(model(a), b).backward()
    steps += 1
    if when == "midst" and steps == 5:
        kill()
    session.step()
if when == "end":
    kill()
session.close()
"""

MORE = [pytest.param(whom, "midst", marks=pytest.mark.matrix) for whom in ("server", "shard")]


@pytest.mark.slow
@pytest.mark.parametrize(("whom", "when"), [("server", "end"), *MORE])
def test_a_killed_server_is_started_again_and_every_sample_counts(tmp_path: Path, whom: str, when: str) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "checkpoints"
    script.write_text(KILLS)
    workers = "1" if when == "end" else "2"
    command = ["run", "--workers", workers, "--servers", "2", "-p", "asp", "--lease", "5"]
    command += [
        "--checkpoint",
        str(folder),
        "--checkpoint-every",
        "10",
        str(script),
        str(tmp_path / "mark"),
        whom,
        when,
    ]
    ran = subprocess.run(
        [sys.executable, "-m", "paceline", *command, str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ("started again" if whom == "server" else "Going back to version") in ran.stderr
    samples = checkpoint.read(folder).job["samples"]
    assert (samples["trained"], samples["open"]) == (4 * 240, [])
