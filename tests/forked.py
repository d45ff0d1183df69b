"""Worker processes that are forked from one that has imported the libraries already: importing them costs many seconds.

As a script, it imports a module, forks a worker for each line of standard input, and prints which one ended, and how.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

SECONDS = 400.0  # a machine may be busy; no test asserts a duration
TESTS = Path(__file__).parent


class ForkedWorkers:
    """Starts workers that call `main` of a module with these arguments, and waits for their ends."""

    def __init__(self, module: str) -> None:
        command = [sys.executable, __file__, module]
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        self._pids: list[int] = []
        self._codes: dict[int, int] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("started "):
                self._pids.append(int(line.split()[1]))
            elif line.startswith("ended "):
                pid, code = map(int, line.split()[1:])
                self._codes[pid] = code

    def start(self, arguments: list[str], variables: dict[str, str]) -> int:
        """Start a worker, and return its process id."""
        assert self._process.stdin is not None
        count = len(self._pids)
        self._process.stdin.write(json.dumps([arguments, variables]) + "\n")
        self._process.stdin.flush()
        self.wait_until(lambda: len(self._pids) > count)
        return self._pids[-1]

    def code(self, pid: int) -> int:
        """Wait for the end of a worker, and return its exit code; that of a signal is negative."""
        self.wait_until(lambda: pid in self._codes)
        return self._codes[pid]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline
            assert self._process.poll() is None
            failed = {pid: code for pid, code in self._codes.items() if code > 0}
            assert not failed, f"workers have failed: {failed}"
            time.sleep(0.02)

    def __enter__(self) -> ForkedWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in self._pids:
            if pid not in self._codes:
                os.kill(pid, 9)
        self._process.kill()
        self._process.wait()
        self._reader.join()


def _serve(module: str) -> None:
    work: Callable[[], None] = importlib.import_module(module).main
    threading.Thread(target=_reap, daemon=True).start()
    for line in sys.stdin:
        arguments, variables = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _work(work, arguments, variables)
        _say(f"started {pid}")


def _reap() -> None:
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            time.sleep(0.02)
        else:
            _say(f"ended {pid} {os.waitstatus_to_exitcode(status)}")


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def _work(work: Callable[[], None], arguments: list[str], variables: dict[str, str]) -> None:
    os.dup2(2, 1)  # the script may print
    os.environ.update(variables)
    sys.argv = ["worker", *arguments]
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
