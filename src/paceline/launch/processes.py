"""Child processes that must not outlive this process."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

from paceline.launch.output_lines import MAX_LINE, Line, OutputLines

TERMINATION_SECONDS = 5.0  # seconds that a process has to end before it is killed
OUTPUT_SECONDS = 2.0  # seconds to read the rest of the output of a process that has ended
PR_SET_PDEATHSIG = 1


class JobError(RuntimeError):
    """A job that failed. The message says what to do."""

    def __init__(self, message: str, said: bool = False, code: int = 1) -> None:
        """said: whether the user has already seen the message. code: the exit code of the command."""
        super().__init__(message)
        self.said, self.code = said, code


class Printer(Protocol):
    """A function that shows a line to the user: output of a script, or (aside) its errors and the job's messages.

    source: the stream that the line comes from; empty for a message of the job. stays: False for a state of a progress
    bar, which the next line of the same source replaces.
    """

    def __call__(self, line: str, *, aside: bool, source: str = "", stays: bool = True) -> None: ...


async def start(
    command: Sequence[str], environment: Mapping[str, str], *, capture: bool, feed: bytes | None = None
) -> asyncio.subprocess.Process:
    """Start a process in its own process group, so that Ctrl-C reaches only this process.

    On Linux, the new process ends if this one is killed.
    capture: pipe its output. feed: bytes to write to its standard input.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**environment, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
        stdin=pipe if feed is not None else asyncio.subprocess.DEVNULL,
        stdout=pipe if capture else None,
        stderr=pipe if capture else None,
        limit=MAX_LINE,
        preexec_fn=_end_with_parent(os.getpid()),
    )
    if feed is not None and process.stdin:
        process.stdin.write(feed)
    return process


async def stop(
    processes: Sequence[asyncio.subprocess.Process],
    seconds: float = TERMINATION_SECONDS,
    number: signal.Signals = signal.SIGTERM,
) -> None:
    """End the processes that still run, together with their process groups. number: the signal to send first."""
    running = [process for process in processes if process.returncode is None]
    for process in running:
        _signal(process, number)
    for process in running:
        try:
            await asyncio.wait_for(process.wait(), seconds)
        except TimeoutError:
            _signal(process, signal.SIGKILL)
            await process.wait()


async def lines(stream: asyncio.StreamReader | None) -> AsyncIterator[Line]:
    """Yield the lines that a process prints, and the states of its progress bar."""
    output = OutputLines()
    while stream:
        data = await stream.read(MAX_LINE)
        for line in output.feed(data) if data else output.end():
            yield line
        if not data:
            return


async def heard(readers: Sequence[asyncio.Future[None]]) -> None:
    """Wait until the output of a process that has ended is read. Its own children may keep the pipes open longer."""
    _, pending = await asyncio.wait(readers, timeout=OUTPUT_SECONDS)
    for reader in pending:
        reader.cancel()


def ending(code: int) -> str:
    """Describe how a process ended, as the rest of a sentence."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _end_with_parent(parent: int) -> Callable[[], None] | None:
    """Return a function for a new process that makes the kernel end it when its parent dies."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)

    def request_signal() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent has died already
            os.kill(os.getpid(), signal.SIGTERM)

    return request_signal
