"""Jobs of two environments: a server with torch, and workers in this one, which has JAX and Keras but no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.observe.trace import Event, from_line

ROOT = Path(__file__).parents[2]
#: The Python of the server. `make setup` installs it.
TORCH_PYTHON = os.environ.get("TORCH_PYTHON", str(ROOT / ".venv/bin/python"))
DIGITS = ROOT / "src/paceline/workloads/bundled/digits.npz"
SECONDS = 600.0
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "SLURM_"))}
ENVIRONMENT = {**CLEAN, "PYTHONPATH": str(ROOT / "src"), "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
Popen = subprocess.Popen[str]


def start(*command: object, **more: str) -> Popen:
    """Start a command in a process group of its own. Its standard output and errors are one stream."""
    return subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT | more,
        start_new_session=True,
    )


def output(process: Popen) -> str:
    """Wait for a command, and return what it printed. Fail if it failed."""
    printed = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 0, printed
    return printed


class ServedJob:
    """A server, and the workers that were started for it."""

    def __init__(self, trace: Path, policy: str, workers: int) -> None:
        self._trace = trace
        serve = (TORCH_PYTHON, "-m", "paceline", "serve", "--workers", workers, "-p", policy, "--trace", trace)
        self.processes = [start(*serve)]
        self.address = ""
        stream = self.processes[0].stdout
        assert stream is not None
        for line in stream:
            if line.startswith("Listening on "):
                self.address = line.removeprefix("Listening on ").strip().rstrip(".")
                return
        raise AssertionError("the server has not started")

    def work(self, *words: object, workers: int = 1, **more: str) -> Popen:
        """Start workers in this environment: `paceline work --workers N WORDS`."""
        join = (sys.executable, "-m", "paceline", "work", "--connect", self.address, "--workers", workers)
        self.processes.append(start(*join, *words, **more))
        return self.processes[-1]

    def work_with_torch(self, script: Path) -> Popen:
        """Start a worker in the environment of the server."""
        self.processes.append(start(TORCH_PYTHON, script, PACELINE_CONNECT=self.address))
        return self.processes[-1]

    def events(self) -> list[Event]:
        """Wait for the end of the job, and return its trace."""
        output(self.processes[0])
        return [from_line(line) for line in self._trace.read_text().splitlines()]


@contextmanager
def served(folder: Path, policy: str, workers: int) -> Iterator[ServedJob]:
    """Serve a job in a process of its own. All processes are gone in the end."""
    job = ServedJob(folder / "trace.jsonl", policy, workers)
    try:
        yield job
    finally:
        for process in job.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(SECONDS)
            if process.stdout:
                process.stdout.close()
