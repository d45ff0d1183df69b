"""Serve one job in this process, from its first worker to its last checkpoint."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from paceline.observe.observer import Observer
from paceline.policies import make
from paceline.serve.job_options import JobOptions
from paceline.serve.server import Address, Server

LISTENING = "Listening on "  # the first words of the line that names the server's address


async def serve_job(
    options: JobOptions, token: bytes, announce: Callable[[str], None], observer: Observer | None = None
) -> None:
    """Serve a job until all workers have left, or until SIGINT or SIGTERM. Write a last checkpoint in both cases.

    announce: is called with one line once the server listens.
    """
    server = Server(
        lambda: make(options.policy),
        options.server_config(token),
        Address(options.host, options.port),
        tls=options.tls,
        observer=observer,
        resume=options.resume,
        own_shards=not options.colocate,
    )
    async with _stop_signal() as stopped:
        await server.start()
        announce(f"{LISTENING}{options.host}:{server.port}.")
        try:
            serving = asyncio.ensure_future(server.serve())
            await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            else:
                serving.cancel()
                await server.coordinator.save()
        finally:
            await server.stop()


@asynccontextmanager
async def _stop_signal() -> AsyncIterator[asyncio.Future[None]]:
    """A future that is done when this process receives SIGINT or SIGTERM."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[None] = loop.create_future()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, lambda: None if stopped.done() else stopped.set_result(None))
    try:
        yield stopped
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
