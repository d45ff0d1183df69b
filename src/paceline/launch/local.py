"""A whole job on this machine: the server, and a process for each worker. One Ctrl-C stops everything."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.observe.observer import Observer, Tee
from paceline.observe.summary import Report, Summary
from paceline.serve.server import server
from paceline.serve.shard import TOKEN

CONNECT, WORKER = "PACELINE_CONNECT", "PACELINE_WORKER"
TERMINATING = 3.0  # seconds that a worker has to end before it is killed


class JobError(RuntimeError):
    """A job that could not be finished. The message says what to do."""


@dataclass(frozen=True)
class Outcome:
    """What a job came to."""

    report: Report
    seconds: float


async def run(
    script: Sequence[str],
    *,
    policy: str,
    workers: int,
    servers: int = 1,
    lease: float = 30.0,
    restarts: int = 1,
    observer: Observer | None = None,
) -> Outcome:
    """Run a training script in so many processes over a server of their own, until all of them have ended.

    A worker that crashes is started again, `restarts` times in all; one crash more ends the job.
    """
    token = secrets.token_bytes(16)
    summary = Summary()
    watching: Observer = summary if observer is None else Tee(summary, observer)
    loop = asyncio.get_running_loop()
    async with server(policy, servers, token=token, lease=lease, workers=workers, observer=watching) as (
        coordinator,
        port,
    ):
        began = loop.time()
        environment = os.environ | {CONNECT: f"127.0.0.1:{port}", TOKEN: token.hex()}
        crew = _Crew(script, environment, restarts)
        try:
            await asyncio.gather(*(crew.keep(number) for number in range(workers)))
        finally:
            await crew.stop()
        if not coordinator.joined_ever:
            raise JobError(f"{script[0]} never called paceline.join, so there was nothing to do together.")
        return Outcome(summary.report(), loop.time() - began)


class _Crew:
    """The workers' processes."""

    def __init__(self, script: Sequence[str], environment: dict[str, str], restarts: int) -> None:
        self._command = [sys.executable, *script]
        self._environment = environment
        self._restarts = restarts
        self._processes: dict[int, asyncio.subprocess.Process] = {}

    async def keep(self, number: int) -> None:
        """Run a worker to its end, and start it again if it crashes."""
        while True:
            process = await asyncio.create_subprocess_exec(
                *self._command, env=self._environment | {WORKER: str(number)}, start_new_session=True
            )
            self._processes[number] = process
            code = await process.wait()
            if code == 0:
                return
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            if self._restarts <= 0:
                raise JobError(f"Worker {number} {how}; its output above says why.")
            self._restarts -= 1
            print(f"Worker {number} {how}; it is started again.", file=sys.stderr)  # noqa: T201

    async def stop(self) -> None:
        """End whoever still runs."""
        running = [process for process in self._processes.values() if process.returncode is None]
        for process in running:
            process.terminate()
        for process in running:
            try:
                await asyncio.wait_for(process.wait(), TERMINATING)
            except TimeoutError:
                process.kill()
                await process.wait()
