"""A whole job: the server, and a process for each worker. One Ctrl-C stops everything."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.launch.processes import JobError, Printer
from paceline.launch.server_process import ServeOptions, ServerProcess
from paceline.launch.supervisor import EVERYWHERE, WorkerCommand, WorkerSupervisor
from paceline.observe.observer import Observer, Tee, replay
from paceline.observe.summary import Report, Summary
from paceline.serve.environment import WORKERS
from paceline.serve.watch import watch
from paceline.serve.wire.endpoint import Endpoint

ENDING = 600.0  # seconds in which a server should have written its last checkpoint

__all__ = ["EVERYWHERE", "JobError", "JobOutcome", "ServeOptions", "run"]


@dataclass(frozen=True)
class JobOutcome:
    """What a job came to."""

    report: Report
    seconds: float  # from the first worker's joining to the last one's leaving


class _Attendance(Observer):
    """Has anybody come, and when did the first come and the last leave?"""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last = 0.0
        self.alone = False  # has nobody come since the server last began, or began again?

    def began(self, *_: object) -> None:
        self.alone = True

    def joined(self, time: float, *_: object) -> None:
        self.first = time if self.first is None else self.first
        self.alone = False

    def left(self, time: float, *_: object) -> None:
        self.last = time


async def run(
    script: Sequence[str],
    options: ServeOptions,
    *,
    restarts: int = 1,
    server_restarts: int = 3,
    ranks: int = 1,
    reduce: str = "",
    hosts: Sequence[str] = (),
    observer: Observer | None = None,
    say: Printer,
) -> JobOutcome:
    """Run a training script in `options.workers` workers over a server of their own, until all of them have ended."""
    token = secrets.token_bytes(16)
    summary, attendance = Summary(), _Attendance()
    watching: Observer = Tee(summary, attendance)
    service = ServerProcess(options, token, server_restarts, say)
    loop = asyncio.get_running_loop()
    began = loop.time()
    tasks: list[asyncio.Future[Any]] = []
    supervisor: WorkerSupervisor | None = None
    try:
        await service.start()
        endpoint = Endpoint(_here(options.host), service.port, token, options.tls)
        started = asyncio.Event()
        seen = asyncio.ensure_future(
            _watch(service, endpoint, Tee(watching, observer) if observer else watching, began, started)
        )
        tasks.append(seen)
        await asyncio.wait((seen, asyncio.ensure_future(started.wait())), return_when=asyncio.FIRST_COMPLETED)
        environment = {WORKERS: str(options.workers)} | (options.tls.as_environment() if options.tls else {})
        connect = f"{socket.gethostname() if hosts and options.host == EVERYWHERE else endpoint.host}:{endpoint.port}"
        task = WorkerCommand(script, connect, token, environment, ranks, reduce, hosts)
        supervisor = WorkerSupervisor(task, restarts, say)
        kept = asyncio.ensure_future(service.keep())
        tasks.append(kept)
        beside = asyncio.gather(
            *(supervisor.attend(number) for number in range(options.workers if options.colocate else 0))
        )
        tasks.append(beside)
        while True:
            working = asyncio.gather(*(supervisor.keep(number, number) for number in range(options.workers)))
            tasks.append(working)
            failing = (beside,) if options.colocate else ()
            await asyncio.wait((kept, working, *failing), return_when=asyncio.FIRST_COMPLETED)
            if failing and beside.done() and not kept.done():
                beside.result()
            if kept.done():
                kept.result()  # its error, if that is why
                supervisor.over = True
            await working
            if attendance.first is None:
                raise JobError(f"{script[0]} never called paceline.join, so there was nothing to do together.")
            ended = asyncio.ensure_future(_ended(service, kept))
            tasks.append(ended)
            await asyncio.wait((ended,), timeout=0.5)  # what was last seen may still be on its way
            while not ended.done() and not attendance.alone:
                await asyncio.wait((ended,), timeout=0.2)
            if ended.done():
                break
            ended.cancel()
            say("The server went back to a checkpoint when all workers had ended; they are started again.", aside=True)
        await ended
        await seen
        return JobOutcome(summary.report(), attendance.last - attendance.first)
    finally:
        for waiting in tasks:
            waiting.cancel()
        if supervisor:
            await supervisor.stop()
        await service.stop()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ended(service: ServerProcess, kept: asyncio.Future[None]) -> None:
    """All workers have ended, and so does the server, unless it was started again just then and waits for them."""
    patience = ENDING + 2 * service.options.lease
    done, _ = await asyncio.wait((kept,), timeout=patience)
    if done:
        kept.result()
    else:
        kept.cancel()
        await service.stop()
        raise JobError("All workers have ended, but the server had gone back to a checkpoint; go on with --resume.")


async def _watch(
    service: ServerProcess, endpoint: Endpoint, observer: Observer, began: float, started: asyncio.Event
) -> None:
    """Show the observer what happens, also when the server is started again; times go on from one to the next."""
    loop = asyncio.get_running_loop()
    while True:
        offset: float | None = None
        try:
            async for event in watch(endpoint):
                if offset is None:
                    offset = loop.time() - began - event.time
                    started.set()
                replay([event._replace(time=event.time + offset)], observer)
        except OSError:
            pass
        if service.over:
            return
        await asyncio.sleep(0.1)


def _here(host: str) -> str:
    """Where a server is found from this machine."""
    return "127.0.0.1" if host == EVERYWHERE else host
