"""SIGTERM asks a worker to leave: it finishes its push, leaves the job and ends. The workers are real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.test_by_hand import LOCAL, Background, all_gone, command
from launch.test_by_hand import started as started  # a fixture
from paceline.observe.trace import from_line

#: A worker that computes for a while, says so, and asks to proceed. It does not import torch.
COMPUTES = """
import sys, time
import paceline
with paceline.coordinate() as pace:
    for step in range(int(sys.argv[1])):
        print("computing", step + 1, flush=True)
        time.sleep(float(sys.argv[2]))
        pace.proceed(batch_size=4)
        print("pushed", step + 1, flush=True)
"""
TRAINS = """
import sys, time, torch, paceline
from torch.utils.data import TensorDataset
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
with paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.01)) as session:
    for (x,) in session.batches(TensorDataset(torch.ones(64, 4)), batch_size=4, epochs=int(sys.argv[1])):
        print("computing", flush=True)
        time.sleep(float(sys.argv[2]))
        loss = model(x).square().mean()
        loss.backward()
        session.step(loss)
"""


class Worker:
    """A script that was started by hand or by `paceline work`, and its output."""

    def __init__(self, how: str, where: str, *script: object) -> None:
        begins = [sys.executable] if how == "python" else command("work", "--connect", where)
        environment = LOCAL | ({"PACELINE_CONNECT": where} if how == "python" else {})
        self.process = subprocess.Popen(
            [*begins, *map(str, script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []

    def reads(self, line: str) -> None:
        """Read the output up to this line."""
        assert self.process.stdout is not None
        for each in self.process.stdout:
            self.lines.append(each.rstrip("\n"))
            if self.lines[-1] == line:
                return
        raise AssertionError(f"{line!r} is not in {self.lines}")

    def ends(self) -> tuple[int, str]:
        """Wait for the end. Return the exit code, and what was printed to standard error."""
        printed, errors = self.process.communicate(timeout=60)
        self.lines += printed.splitlines()
        return self.process.returncode, errors


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "computes.py"
    path.write_text(COMPUTES)
    return path


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    """A list of workers that are killed at the end of the test."""
    running: list[Worker] = []
    yield running
    for each in running:
        if each.process.poll() is None:
            each.process.kill()
            each.process.communicate()


def server_of(tmp_path: Path, started: list[Background], *options: object) -> tuple[Background, str, Path]:
    """Start a server that only paces. Return it, its address and the file of its trace."""
    trace = tmp_path / "run.jsonl"
    server = Background("serve", "--servers", 0, "-p", "asp", "--trace", trace, *options)
    started.append(server)
    return server, server.address(), trace


def count_applied(trace: Path) -> int:
    """Return the number of updates that changed the model."""
    return sum(type(from_line(line)).__name__ == "Applied" for line in trace.read_text().splitlines())


@pytest.mark.core
@pytest.mark.parametrize("how", ["python", pytest.param("work", marks=pytest.mark.slow)])
def test_a_worker_leaves_after_its_push(
    how: str, script: Path, tmp_path: Path, started: list[Background], workers: list[Worker]
) -> None:
    server, where, trace = server_of(tmp_path, started)
    workers.append(Worker(how, where, script, 1000, 0.5))
    workers[0].reads("pushed 1")
    workers[0].reads("computing 2")
    began = time.monotonic()
    workers[0].process.send_signal(signal.SIGTERM)
    code, errors = workers[0].ends()
    assert code == 143, errors
    assert time.monotonic() - began < 10
    assert workers[0].lines[-1] == "computing 2", "it computes no third gradient, and does not wait to proceed"
    by_hand = "Joined the job as worker 0.\nSIGTERM: this worker leaves the job after its push.\n"
    assert errors == (by_hand if how == "python" else "Interrupted; the workers of this machine have left the job.\n")
    again = Worker("python", where, script, 2, 0.0)
    workers.append(again)
    assert again.ends()[0] == 0, "the job waited for a worker to come back"
    assert server.ends(20.0) == 0
    assert count_applied(trace) == 2 + 2, "the update that it was computing counts"


@pytest.mark.slow
def test_a_worker_that_waits_for_others_leaves_at_once(
    script: Path, tmp_path: Path, started: list[Background], workers: list[Worker]
) -> None:
    _, where, _ = server_of(tmp_path, started, "--workers", 2)
    workers.append(Worker("python", where, script, 1, 0.0))
    assert workers[0].process.stderr is not None
    assert "waiting for 1 more worker" in workers[0].process.stderr.readline()
    workers[0].process.send_signal(signal.SIGTERM)
    assert workers[0].ends()[0] == 143


@pytest.mark.slow
def test_a_second_signal_ends_a_worker_at_once(
    script: Path, tmp_path: Path, started: list[Background], workers: list[Worker]
) -> None:
    _, where, _ = server_of(tmp_path, started)
    workers.append(Worker("python", where, script, 10, 100.0))
    workers[0].reads("computing 1")
    workers[0].process.send_signal(signal.SIGTERM)
    workers[0].process.send_signal(signal.SIGTERM)  # a scheduler and `paceline work` may both signal it
    time.sleep(1.5)
    assert workers[0].process.poll() is None
    workers[0].process.send_signal(signal.SIGTERM)
    assert workers[0].ends()[0] == -signal.SIGTERM


@pytest.mark.slow
def test_a_second_signal_ends_the_workers_of_the_command(
    script: Path, tmp_path: Path, started: list[Background]
) -> None:
    _, where, _ = server_of(tmp_path, started)
    work = Background("work", "--connect", where, script, 10, 100.0)
    started.append(work)
    work.wait_for("computing 1")
    children = work.children()
    work.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    work.process.send_signal(signal.SIGTERM)
    assert work.ends() == 143
    assert all_gone(children)


@pytest.mark.slow
def test_only_the_signalled_worker_leaves_and_is_not_restarted(
    script: Path, tmp_path: Path, started: list[Background]
) -> None:
    """A scheduler may signal the script itself. `paceline work` does not take that for a crash."""
    _, where, _ = server_of(tmp_path, started)
    work = Background("work", "--connect", where, script, 1000, 0.2)
    started.append(work)
    work.wait_for("pushed 1")
    (child,) = work.children()
    os.kill(child, signal.SIGTERM)
    assert work.ends() == 143
    assert work.lines[-1] == "Interrupted; the workers of this machine have left the job."


@pytest.mark.slow
def test_a_server_that_is_asked_to_end_does_not_report_success(tmp_path: Path, started: list[Background]) -> None:
    """Kubernetes would take a pod that ends with 0 for done, and would not replace it."""
    server, _, _ = server_of(tmp_path, started)
    server.process.send_signal(signal.SIGTERM)
    assert server.ends() == 143


@pytest.mark.slow
def test_a_worker_leaves_soon_if_the_server_is_gone_too(
    script: Path, tmp_path: Path, started: list[Background], workers: list[Worker]
) -> None:
    server, where, _ = server_of(tmp_path, started)
    workers.append(Worker("python", where, script, 1000, 1.0))
    workers[0].reads("pushed 1")
    workers[0].reads("computing 2")
    began = time.monotonic()
    workers[0].process.send_signal(signal.SIGTERM)
    server.process.send_signal(signal.SIGTERM)
    code, errors = workers[0].ends()
    assert code == 143, errors
    assert time.monotonic() - began < 20, "it retries for 60 s otherwise"
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_worker_leaves_and_another_process_continues(
    ranks: int, tmp_path: Path, started: list[Background]
) -> None:
    """Each sample counts once, however the work is divided between the two processes."""
    script, trace = tmp_path / "trains.py", tmp_path / "run.jsonl"
    script.write_text(TRAINS)
    server = Background("serve", "-p", "asp", "--trace", trace)
    started.append(server)
    where = server.address()
    first = Background("work", "--connect", where, "--ranks-per-worker", ranks, script, 1, 0.3)
    started.append(first)
    first.wait_for("computing")
    first.process.send_signal(signal.SIGTERM)
    assert first.ends() == 143, first.lines
    second = Background("work", "--connect", where, "--ranks-per-worker", ranks, script, 1, 0.0)
    started.append(second)
    assert second.ends() == 0, second.lines
    assert server.ends(20.0) == 0
    assert count_applied(trace) == 64 // (4 * ranks)
