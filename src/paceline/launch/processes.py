"""Processes that are started here and must not outlive us."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

TERMINATING = 5.0  # seconds that a process has to end before it is killed
LAST_WORDS = 2.0  # seconds to hear what an ended process has said
PR_SET_PDEATHSIG = 1


class JobError(RuntimeError):
    """A job that could not be finished. The message says what to do; it may have been shown already."""

    def __init__(self, message: str, said: bool = False) -> None:
        super().__init__(message)
        self.said = said


class Printer(Protocol):
    """Shows a person a line: what a script printed, or (aside) what it complained of or what happened to it."""

    def __call__(self, line: str, *, aside: bool) -> None: ...


async def start(
    command: Sequence[str], environment: Mapping[str, str], *, capture: bool, feed: bytes | None = None
) -> asyncio.subprocess.Process:
    """Start a process in a group of its own, so that a Ctrl-C reaches us first. If we are killed, so is it (Linux)."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**environment, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
        stdin=pipe if feed is not None else asyncio.subprocess.DEVNULL,
        stdout=pipe if capture else None,
        stderr=pipe if capture else None,
        limit=1 << 20,
        preexec_fn=_die_with(os.getpid()),
    )
    if feed is not None and process.stdin:
        process.stdin.write(feed)
    return process


async def stop(processes: Sequence[asyncio.subprocess.Process], seconds: float = TERMINATING) -> None:
    """End whoever still runs, with all that they started in their group."""
    running = [process for process in processes if process.returncode is None]
    for process in running:
        _signal(process, signal.SIGTERM)
    for process in running:
        try:
            await asyncio.wait_for(process.wait(), seconds)
        except TimeoutError:
            _signal(process, signal.SIGKILL)
            await process.wait()


async def lines(stream: asyncio.StreamReader | None) -> AsyncIterator[str]:
    """What a process prints, line after line."""
    while stream:
        try:
            line = await stream.readline()
        except ValueError:  # a line without end
            continue
        if not line:
            return
        yield line.decode(errors="replace").rstrip("\n")


async def heard(listening: Sequence[asyncio.Future[None]]) -> None:
    """Until all is heard that a process said which has ended. What it left behind may hold its pipes open."""
    _, still = await asyncio.wait(listening, timeout=LAST_WORDS)
    for each in still:
        each.cancel()


def ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _die_with(parent: int) -> Callable[[], None] | None:
    """To be called in a new process: it is killed when its parent dies, however that dies."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)

    def die_with_parent() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it is dead already
            os.kill(os.getpid(), signal.SIGTERM)

    return die_with_parent
