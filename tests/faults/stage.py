"""Runs the scenarios of tests in separate processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from faults.scenario import Outcome, Scenario

AT_ONCE = 4  # scenarios that run in parallel; they spend most of their time waiting


class Stage:
    """Runs scenarios in a process of its own, and begins the next ones ahead of time."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-")
        self._address = str(Path(self._folder.name) / "zygote")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address)
            listener.listen(64)
            paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            command = [sys.executable, "-m", "faults.zygote", str(listener.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[listener.fileno()], env=environment)
        self._threads = ThreadPoolExecutor(AT_ONCE)
        self._begun: dict[bytes, Future[Outcome]] = {}

    def prepare(self, scenario: Scenario) -> None:
        """Begin a scenario that will soon be run."""
        key = msgspec.json.encode(scenario)
        if key not in self._begun:
            self._begun[key] = self._threads.submit(self._run, key, scenario.limit)

    def run(self, scenario: Scenario) -> Outcome:
        """Run a scenario, and return its outcome."""
        self.prepare(scenario)
        return self._begun.pop(msgspec.json.encode(scenario)).result()

    def _run(self, scenario: bytes, limit: float) -> Outcome:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(limit + 60.0)
            sock.connect(self._address)
            with sock.makefile("rwb") as stream:
                stream.write(scenario + b"\n")
                stream.flush()
                answer = stream.readline()
        assert answer, "the director died"
        return msgspec.json.decode(answer, type=Outcome)

    def close(self) -> None:
        """End the process that runs the scenarios."""
        self._threads.shutdown(cancel_futures=True)
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()
