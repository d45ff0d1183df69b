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
        async with asyncio.TaskGroup() as group:  # an error in a task ends the page, and is printed
            following: asyncio.Task[None] | None = None
            while line := await reader.readline():
                job = msgspec.json.decode(line, type=WatchedJob)
                if following:
                    following.cancel()
                    await asyncio.wait((following,))
                shown.floors = [] if job.floor is None else [job.floor]
                following = group.create_task(follow(state, job.endpoint))
            if following:
                following.cancel()

    await serve_page(listening, PageState(shown), tell, token=setup.token, tls=setup.tls, host=setup.host)


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(LOWER)
    with socket.socket(fileno=int(sys.argv[1])) as listening, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(listening))
