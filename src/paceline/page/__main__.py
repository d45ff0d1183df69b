"""The process of a page: `python -m paceline.page FD`, with the setup and the jobs to show on standard input."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys

import msgspec

from paceline.page.process import PageSetup, WatchedJob
from paceline.page.serving import serve_page
from paceline.page.sources import follow
from paceline.page.state import PageState, Shown

LOWER = 10  # how much lower the priority of this process is than the job's


async def main(listening: socket.socket) -> None:
    """Serve the page until standard input ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    setup = msgspec.json.decode(await reader.readline(), type=PageSetup)
    shown = Shown(title=setup.title)

    async def tell(state: PageState) -> None:
        following: asyncio.Future[None] | None = None
        try:
            while line := await reader.readline():
                job = msgspec.json.decode(line, type=WatchedJob)
                if following:
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)
                shown.floors = [] if job.floor is None else [job.floor]
                following = asyncio.ensure_future(follow(state, job.endpoint))
        finally:
            if following:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    await serve_page(listening, PageState(shown), tell, token=setup.token, tls=setup.tls)


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(LOWER)
    with socket.socket(fileno=int(sys.argv[1])) as listening, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(listening))
