"""Example scripts that run in this process: alone, or as the workers of a job."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.serve.environment import CONNECT
from train.generations import served
from train.jobs import Job

ROOT = Path(__file__).parents[2]
JOIN_SECONDS = 60.0


class Scripts:
    """Runs scripts as `python SCRIPT ARGUMENTS` does, but without a process of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._at_exit: dict[int, list[Callable[[], object]]] = {}  # of each thread that runs a script
        register = atexit.register

        def register_here(function: Callable[..., object], *arguments: Any, **options: Any) -> object:
            functions = self._at_exit.get(threading.get_ident())
            if functions is None:
                return register(function, *arguments, **options)
            functions.append(lambda: function(*arguments, **options))
            return function

        monkeypatch.setattr(atexit, "register", register_here)
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # a script that joins a job replaces it

    def alone(self, script: str, *arguments: str) -> dict[str, Any]:
        """Run a script, and return its global variables."""
        self._prepare(script, arguments)
        self._patch.delenv(CONNECT, raising=False)
        return self._run(script)

    def together(
        self, script: str, *arguments: str, policy: str = "bsp:weights=mean", workers: int = 2, **options: Any
    ) -> Job:
        """Run a script in the workers of a job, and return the job after its end. "{worker}" is the worker's number.

        A worker starts when the one before it has joined. So worker 0 is the first one, and the model gets the random
        numbers that it gets in one process, though threads share them.
        """
        with served(policy, workers=workers, **options) as running:
            self._patch.setenv(CONNECT, running.address)

            def work(number: int) -> Callable[[str], Any]:
                def start(_: str) -> dict[str, Any]:
                    deadline = time.monotonic() + JOIN_SECONDS
                    while running.coordinator.state.missing > workers - number:
                        assert time.monotonic() < deadline, f"worker {number - 1} has not joined"
                        time.sleep(0.005)
                    self._prepare(script, [argument.format(worker=number) for argument in arguments])
                    return self._run(script)

                return start

            running.work(*(work(number) for number in range(workers)), seconds=120.0)
        return running

    def _prepare(self, script: str, arguments: Sequence[str]) -> None:
        folder = (ROOT / script).parent
        self._patch.setattr(sys, "argv", [script, *arguments])
        self._patch.syspath_prepend(str(folder))
        for path in folder.glob("*.py"):  # a package of tests may have the name of a module of the script
            known = sys.modules.get(path.stem)
            if known is not None and known.__file__ != str(path):
                self._patch.delitem(sys.modules, path.stem)

    def _run(self, script: str) -> dict[str, Any]:
        path, thread = ROOT / script, threading.get_ident()
        variables = {"__name__": "__main__", "__file__": str(path)}
        at_exit = self._at_exit[thread] = []
        try:
            exec(compile(path.read_text(), str(path), "exec"), variables)
        finally:
            for function in reversed(at_exit):
                function()
            del self._at_exit[thread]
        return variables
