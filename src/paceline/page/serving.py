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

LAST = 1.0  # seconds that viewers get to take the last frame


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
) -> None:
    """Show the state at a listening socket until `tell`, which feeds it with events, returns.

    token: viewers on other machines must know it, or the token to watch that is derived from it.
    """
    frames = Frames(state)
    alone = is_loopback(listening.getsockname()[0])
    config = uvicorn.Config(
        application(frames, PageGuard(b"" if alone else token, alone)),
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_certfile=tls.cert if tls else None,
        ssl_keyfile=tls.key if tls else None,
        timeout_graceful_shutdown=1,
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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST):
                while frames.viewers:
                    await asyncio.sleep(0.02)
        making.cancel()
        server.should_exit = True
        await asyncio.gather(serving, making, telling, return_exceptions=True)
