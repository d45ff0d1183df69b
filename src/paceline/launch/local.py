"""Run a complete job: the server, and the processes of each worker. One Ctrl-C stops all of them."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from paceline.launch.processes import JobError, Printer
from paceline.launch.server_process import ServerProcess
from paceline.launch.supervisor import EVERYWHERE, WorkerCommand, WorkerSupervisor
from paceline.model import checkpoint
from paceline.observe.observer import Observer, Tee, replay
from paceline.observe.summary import Report, Summary
from paceline.serve import cores
from paceline.serve.environment import WORKERS
from paceline.serve.job_options import JobOptions
from paceline.serve.last_save import UNSAVED
from paceline.serve.serve_job import NO_UPDATE
from paceline.serve.watch import watch
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.link import emulated

LAST_CHECKPOINT_SECONDS = 600.0  # seconds that the server has to write its last checkpoint

__all__ = ["EVERYWHERE", "JobError", "JobOutcome", "run"]


@dataclass(frozen=True)
class JobOutcome:
    """The result of a job."""

    report: Report
    seconds: float  # from the first join to the last update, as for the rates in the report


class _Attendance(Observer):
    """An observer of when workers join."""

    def __init__(self) -> None:
        self.first_join: float | None = None
        self.is_empty = False  # whether no worker has joined since the server was started or restarted
        self.has_updates = False  # whether an update was applied

    def began(self, *_: object) -> None:
        self.is_empty = True

    def joined(self, time: float, *_: object) -> None:
        self.first_join = time if self.first_join is None else self.first_join
        self.is_empty = False

    def applied(self, *_: object) -> None:
        self.has_updates = True


async def run(
    script: Sequence[str],
    options: JobOptions,
    *,
    ranks: int = 1,
    reduce: str = "",
    hosts: Sequence[str] = (),
    server_hosts: Sequence[str] = (),
    link: float | None = None,
    observer: Observer | None = None,
    say: Printer,
    again: asyncio.Event | None = None,
    show: Callable[[Endpoint], None] | None = None,
) -> JobOutcome:
    """Start a server, run a training script in `options.workers` workers, and wait until all of them have ended.

    options.restarts limits how often the workers are restarted, all together. The server's process and its shards are
    each counted apart, so that workers which come and go leave the server its restarts.
    ranks: processes per worker. reduce: the collective by which they sum their gradients. hosts: where the workers run.
    server_hosts: where the shards run, if options.shards_join says that they join the server.
    link: emulate links of this rate, in bytes per second, between workers and shards on this machine.
    again: set if the user insists on the end of a job that is being stopped.
    show: is called with the server's address, for a page that shows the job.
    """
    token = secrets.token_bytes(16)
    summary, attendance = Summary(), _Attendance()
    observers: Observer = Tee(summary, attendance)
    files = ExitStack()
    joins = options.colocate or options.shards_join  # are the shards started here, and not by the server?
    linked = files.enter_context(emulated(link, options.workers, 0 if options.colocate else options.shards))
    limits = {} if hosts else cores.settings(options.workers * ranks, os.environ)
    server = ServerProcess(options, token, say, linked | limits)
    loop = asyncio.get_running_loop()
    began = loop.time()
    tasks: list[asyncio.Future[Any]] = []
    supervisor: WorkerSupervisor | None = None
    try:
        await server.start()
        serving = asyncio.ensure_future(server.keep())
        tasks.append(serving)
        had_updates = options.resume is not None and checkpoint.read(options.resume, quick=True).version > 0
        tls = options.tls.for_peers() if options.tls else None
        endpoint = Endpoint(_address_here(options.host), server.port, token, tls)
        if show:
            show(endpoint)
        subscribed = asyncio.Event()
        watching = asyncio.ensure_future(
            _watch(server, endpoint, Tee(observers, observer) if observer else observers, began, subscribed)
        )
        heard = asyncio.ensure_future(subscribed.wait())
        tasks += [watching, heard]
        await asyncio.wait((watching, heard, serving), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()  # raises if the server failed
        server.is_used = True
        environment = {WORKERS: str(options.workers)} | (tls.as_environment() if tls else {}) | linked
        is_spread = bool(hosts or server_hosts) and options.host == EVERYWHERE
        connect = f"{socket.gethostname() if is_spread else endpoint.host}:{endpoint.port}"
        command = WorkerCommand(
            *(script, connect, token, environment, ranks, reduce, hosts),
            workers=options.workers,
            server_hosts=server_hosts,
            shards=options.shards,
        )
        supervisor = WorkerSupervisor(command, options.restarts, say)
        places = itertools.product(range(1 + options.replicas), range(options.shards if joins else 0))
        shards = asyncio.gather(*(supervisor.keep_shard(number, replica) for replica, number in places))
        tasks.append(shards)
        while True:
            working = asyncio.gather(*(supervisor.keep(number, number) for number in range(options.workers)))
            tasks.append(working)
            await asyncio.wait((serving, working, *((shards,) if joins else ())), return_when=asyncio.FIRST_COMPLETED)
            if joins and shards.done() and not serving.done():
                shards.result()  # raises if a shard has failed; otherwise the server is about to end
                await asyncio.wait((serving, working), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()  # raises if the server failed
                await supervisor.end_with_server()
            await working
            if attendance.first_join is None:
                raise JobError(f"{script[0]} never called paceline.join, so no worker took part in the job.")
            ended = asyncio.ensure_future(_wait_for_end(server, serving))
            tasks.append(ended)
            await asyncio.wait((ended,), timeout=0.5)  # the last events may still be on their way
            while not ended.done() and not attendance.is_empty:
                await asyncio.wait((ended,), timeout=0.2)
            if ended.done():
                break
            ended.cancel()
            say("The server restored a checkpoint after all workers had ended; restarting the workers.", aside=True)
        await ended
        await watching
        if options.shards and not (attendance.has_updates or had_updates):
            raise JobError(NO_UPDATE)
        report = summary.report()
        return JobOutcome(report, report.seconds)
    finally:
        for task in tasks:
            task.cancel()
        if supervisor:
            await supervisor.stop()
        await server.stop(again)
        await asyncio.gather(*tasks, return_exceptions=True)
        files.close()
        this = asyncio.current_task()
        if server.is_unsaved and this and this.cancelling():
            raise server.failure(UNSAVED)


async def _wait_for_end(server: ServerProcess, serving: asyncio.Future[None]) -> None:
    """Wait for the server to end after all workers have ended.

    It does not end if it was restarted at that moment: then it waits for workers, and a JobError is raised.
    """
    patience = server.options.saving.patience if server.options.saving else 0.0
    done, _ = await asyncio.wait((serving,), timeout=LAST_CHECKPOINT_SECONDS + patience + 2 * server.options.lease)
    if done:
        serving.result()
    else:
        serving.cancel()
        await server.stop()
        raise JobError("All workers have ended, but the server restored a checkpoint; continue the job with --resume.")


async def _watch(
    server: ServerProcess, endpoint: Endpoint, observer: Observer, began: float, subscribed: asyncio.Event
) -> None:
    """Pass the server's events to the observer, across restarts of the server. Times continue from one to the next."""
    loop = asyncio.get_running_loop()
    while True:
        offset: float | None = None
        try:
            async for event in watch(endpoint):
                if offset is None:
                    offset = loop.time() - began - event.time
                    subscribed.set()
                replay([event], observer, offset)
        except OSError:
            pass
        if server.over:
            return
        await asyncio.sleep(0.1)


def _address_here(host: str) -> str:
    """Return the address at which this machine reaches a server that listens on `host`."""
    return "127.0.0.1" if host == EVERYWHERE else host
