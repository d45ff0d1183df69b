"""Serve a page at a listening socket, with uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator

import uvicorn

from paceline.page.app import application
from paceline.page.frames import Frames
from paceline.page.guard import PageGuard
from paceline.page.state import PageState
from paceline.serve.wire.endpoint import is_loopback
from paceline.serve.wire.tls import Tls

LAST = 2.0  # seconds that viewers get to take the last frame


class _Uvicorn(uvicorn.Server):
    """A uvicorn server that leaves the signals to its caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_page(
    listening: socket.socket,
    state: PageState,
    tell: Callable[[PageState], Awaitable[None]],
    *,
    token: bytes = b"",
    tls: Tls | None = None,
    host: str = "",
) -> None:
    """Show the state at a listening socket until `tell`, which feeds it with events, returns.

    token: viewers on other machines must know it, or the token to watch that is derived from it. host: the host that
    the user has named, by which viewers may call the page.
    """
    frames = Frames(state)
    alone = is_loopback(listening.getsockname()[0])
    config = uvicorn.Config(
        application(frames, PageGuard(b"" if alone else token, alone, host)),
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="error",  # the lines of its start, and requests that are no HTTP, are no news
        access_log=False,
        server_header=False,
        ssl_certfile=tls.cert if tls else None,
        ssl_keyfile=tls.key if tls else None,
    )
    server = _Uvicorn(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    making = asyncio.ensure_future(frames.keep_making())
    telling = asyncio.ensure_future(tell(state))
    try:
        done, _ = await asyncio.wait((serving, telling, making), return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    finally:
        telling.cancel()
        state.end()
        frames.finish()
        server.should_exit = True
        await asyncio.wait((serving,), timeout=LAST)
        for connection in server.server_state.connections:  # of viewers that do not read
            if connection.transport:
                connection.transport.abort()
        making.cancel()
        await asyncio.gather(serving, making, telling, return_exceptions=True)
