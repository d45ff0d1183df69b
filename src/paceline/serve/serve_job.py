"""Serve one job in this process, from its first worker to its last checkpoint."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from paceline.model import checkpoint
from paceline.observe.observer import Observer
from paceline.policies import is_same_policy, make
from paceline.serve.job_options import JobOptions
from paceline.serve.server import Address, Server
from paceline.serve.wire.endpoint import Endpoint

log = logging.getLogger(__name__)
LISTENING = "Listening on "  # the first words of the line that names the server's address
#: The error of a job whose workers have ended without an update.
NO_UPDATE = (
    "No worker made an update, so the model has not changed: call optimizer.step() or session.step() after "
    "loss.backward()."
)


class ServedJob(NamedTuple):
    """How a job ended."""

    is_done: bool  # whether all workers have left; False if a signal has stopped the server
    version: int  # of the model: the number of updates that changed it
    is_saved: bool  # whether the last checkpoint is written, or none was asked for
    is_spoiled: bool = False  # whether it is not, because the model holds numbers that are not finite
    signal: int = 0  # the signal that has stopped the server, or 0


async def serve_job(
    options: JobOptions,
    token: bytes,
    announce: Callable[[str], None],
    observer: Observer | None = None,
    parent: int | None = None,
    show: Callable[[Endpoint], None] | None = None,
) -> ServedJob:
    """Serve a job until all workers have left, or until SIGINT or SIGTERM. Write a last checkpoint in both cases.

    announce: is called with one line once the server listens. A signal after the last checkpoint has failed gives the
    model up. parent: a process; if it is gone, a last checkpoint that fails is not tried again. show: is called with
    the address at which this machine reaches the server, for a page that shows the job.
    """
    server = Server(
        lambda: make(options.policy),
        options.server_config(token),
        Address(options.host, options.port, options.insecure),
        tls=options.tls,
        observer=observer,
        resume=options.resume,
        restarts=options.restarts,
        own_shards=not (options.colocate or options.shards_join),
    )
    note_new_weights(options)
    async with _stop_signal(server, parent) as stopped:
        await server.start()
        known_by = f", fingerprint {server.fingerprint}" if server.fingerprint else ""
        announce(f"{LISTENING}{options.host}:{server.port}{known_by}.")
        if show:
            here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
            show(Endpoint(here, server.port, token, options.tls.for_peers() if options.tls else None))
        try:
            serving = asyncio.ensure_future(server.serve())
            await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
            is_done = serving.done()
            if is_done:
                is_saved = serving.result()
            else:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
                is_saved = await server.save()
            checkpoints = server.coordinator.state.checkpoints
            is_spoiled = checkpoints is not None and checkpoints.is_spoiled
            stopped_by = 0 if is_done else stopped.result()
            return ServedJob(is_done, server.coordinator.state.version, is_saved, is_spoiled, stopped_by)
        finally:
            await server.stop()


def unsaved(options: JobOptions, job: ServedJob) -> str:
    """Return the error of a job whose last checkpoint could not be written."""
    version = job.version
    folder = options.saving.folder if options.saving else None
    found = checkpoint.newest(folder, quick=True) if folder else None
    if job.is_spoiled:
        again = f", and continue from version {found.version} with --resume {folder}" if found else ""
        return f"The model of version {version} holds numbers that are not finite; lower the learning rate{again}."
    told = f"The model of version {version} is lost, because its last checkpoint could not be written"
    if found is None:
        return f"{told}; give --checkpoint a folder with enough space."
    return f"{told}; free space, and continue from version {found.version} with --resume {folder}."


def note_new_weights(options: JobOptions) -> None:
    """Warn if the job resumes a checkpoint whose policy meant weights=sum, because it did not name its weights."""
    saved = str(checkpoint.read(options.resume, quick=True).job.get("policy", "")) if options.resume else options.policy
    if saved != options.policy and is_same_policy(saved, options.policy):
        log.warning(
            "The checkpoint was trained under %s with weights=sum. The job continues under %s, with 1/N of the step "
            "size for N workers. To keep the old steps, name weights=sum.",
            saved,
            options.policy,
        )


@asynccontextmanager
async def _stop_signal(server: Server, parent: int | None) -> AsyncIterator[asyncio.Future[int]]:
    """A future of the first SIGINT or SIGTERM that this process receives. A signal can also give the model up."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def stop(number: int) -> None:
        is_orphan = parent is not None and os.getppid() != parent
        if not server.give_up(ahead=is_orphan) and not stopped.done():
            stopped.set_result(number)

    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        yield stopped
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
