"""Jobs of real processes on this machine: they finish, they survive a kill, and their errors are sentences."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from paceline.observe.events import Applied, Arrived, Joined, Left, from_line

TRAINS = """
import os, pathlib, signal, sys
import torch
import paceline

torch.manual_seed(0)
x, y = torch.randn(240, 6), torch.randint(0, 3, (240,))
model = torch.nn.Linear(6, 3)
mark = pathlib.Path(sys.argv[1])
with paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
    steps = 0
    for a, b in session.batches(torch.utils.data.TensorDataset(x, y), batch_size=8, epochs=4):
        loss = torch.nn.functional.cross_entropy(model(a), b)
        loss.backward()
        steps += 1
        if session.worker == 1 and steps == 5 and len(sys.argv) > 2 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), getattr(signal, sys.argv[2]))
        session.step(loss)
"""


def paceline_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def samples_applied(trace: Path) -> int:
    """Samples whose update changed the model, each update once."""
    waiting: dict[tuple[int, int], int] = {}
    total = 0
    for line in trace.read_text().splitlines():
        event = from_line(line)
        if isinstance(event, Arrived):
            waiting[event.worker, event.iteration] = event.batch_size
        elif isinstance(event, Applied):
            total += sum(waiting.pop(key) for key in zip(event.workers, event.iterations, strict=True))
    return total


@pytest.mark.slow
def test_a_job_trains_on_every_sample_once_an_epoch(tmp_path: Path) -> None:
    script, trace = tmp_path / "train.py", tmp_path / "trace.jsonl"
    script.write_text(TRAINS)
    ran = paceline_run(
        "--workers", "2", "--servers", "2", "-p", "r2sp", "--trace", str(trace), str(script), str(tmp_path / "mark")
    )
    assert ran.returncode == 0, ran.stderr
    assert "r2sp: 120 updates" in ran.stdout
    assert samples_applied(trace) == 4 * 240


@pytest.mark.slow
def test_a_killed_worker_comes_back_and_no_sample_is_lost(tmp_path: Path) -> None:
    script, trace = tmp_path / "train.py", tmp_path / "trace.jsonl"
    script.write_text(TRAINS)
    ran = paceline_run(
        *("--workers", "2", "-p", "r2sp", "--lease", "2", "--trace", str(trace)),
        *(str(script), str(tmp_path / "mark"), "SIGKILL"),
    )
    assert ran.returncode == 0, ran.stderr
    assert "Worker 1 was killed by SIGKILL; it is started again." in ran.stderr
    events = [from_line(line) for line in trace.read_text().splitlines()]
    left = [event.time for event in events if isinstance(event, Left) and event.worker == 1]
    back = [event.time for event in events if isinstance(event, Joined) and event.worker == 1]
    assert len(back) == 2
    assert back[0] < left[0] <= back[1]
    assert samples_applied(trace) == 4 * 240


def test_a_script_that_never_joins_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "idle.py"
    script.write_text("print('nothing')\n")
    ran = paceline_run("--workers", "1", str(script))
    assert ran.returncode == 1
    assert "never called paceline.join" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_script_that_crashes_twice_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "crash.py"
    script.write_text("raise SystemExit(3)\n")
    ran = paceline_run("--workers", "1", "--restarts", "1", str(script))
    assert ran.returncode == 1
    assert ran.stderr.count("ended with exit code 3") == 2
    assert "it is started again" in ran.stderr


def test_a_missing_script_is_told_so(tmp_path: Path) -> None:
    ran = paceline_run("--workers", "1", str(tmp_path / "none.py"))
    assert ran.returncode == 2
    assert "There is no script" in ran.stderr
