"""Processes on the hosts of a lab: functions in forked processes, and commands."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import signal
import subprocess
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from paceline.lab.leftovers import NAMESPACES
from paceline.lab.netns_exec import enter

PR_SET_PDEATHSIG = 1


class Command:
    """A command that runs on a host. It has the attributes and methods of a multiprocessing process that labs use."""

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        self._process, self.name, self.pid = process, name, process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def join(self, seconds: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


def context() -> Any:
    """Return the multiprocessing context of labs, which forks processes from one that has loaded torch."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["paceline.lab.preload"])
    return found


def run_in(namespace: str, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """Call a function in a namespace. This is the main function of a process on a host."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that built the lab; it stops this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not (NAMESPACES / namespace).exists():
        return  # the lab was removed before this process started
    enter(namespace)
    with contextlib.suppress(BrokenPipeError):  # likewise
        function(*arguments)


def answer(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call a function, and send (True, its result) or (False, its error message) through the pipe."""
    try:
        result = (True, function(*arguments))
    except Exception as error:
        result = (False, f"{type(error).__name__}: {error}")
    with contextlib.suppress(OSError):  # the caller may be gone
        pipe.send(result)


def wait_or_kill(process: BaseProcess | Command, seconds: float) -> None:
    """Wait until a process ends. Kill it after `seconds`."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()


def _die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, so that nothing outlives the lab."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
