"""Pages for tests: recorded runs, and a page that is served in this process."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from paceline.observe.observer import Recorder
from paceline.observe.summary import Report, Summary
from paceline.observe.trace import NAMES, Event
from paceline.page.serving import serve_page
from paceline.page.state import PageState, Shown
from paceline.policies import make
from paceline.serve.wire.tls import Tls
from paceline.simulate import Cluster, load_cluster

TIMEOUT = 30.0


@cache
def recorded(policy: str, cluster: str = "r2sp-a-vgg16", iterations: int = 20) -> list[Event]:
    """The events of a simulated run."""
    events: list[Event] = []
    recorder = Recorder(events.append)
    recorder.began(0.0, cluster, policy, "whole", 0)
    Cluster(load_cluster(cluster), make(policy), iterations, 0, False, recorder).run()
    return events


def report_of(events: Iterable[Event]) -> Report:
    """The report of all events, without a warm-up."""
    summary = Summary()
    for event in events:
        getattr(summary, NAMES[type(event)])(*event)
    return summary.report()


def state_of(events: Iterable[Event], **shown: Any) -> PageState:
    """A page that shows all events of a recorded run."""
    state = PageState(Shown(recorded=True, **shown))
    for event in events:
        state.tell(event)
    return state


@dataclass
class Answer:
    """An answer of a page over HTTP."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass
class Served:
    """A page that is served at a port of this machine."""

    state: PageState
    host: str
    port: int
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/"

    async def open(
        self, path: str, *headers: str, method: str = "GET"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request. The names of headers that are given replace the usual ones."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 24)
        given = {line.partition(":")[0].lower() for line in headers}
        usual = [f"Host: {self.host}:{self.port}", "Connection: close"]
        lines = [*(line for line in usual if line.partition(":")[0].lower() not in given), *headers]
        writer.write("\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode())
        return reader, writer

    async def get(self, path: str, *headers: str) -> Answer:
        """Send a request, and return the whole answer."""
        reader, writer = await self.open(path, *headers)
        async with asyncio.timeout(TIMEOUT):
            head = await reader.readuntil(b"\r\n\r\n")
            status, named = parsed(head)
            body = await (reader.readexactly(int(length)) if (length := named.get("content-length")) else reader.read())
        writer.close()
        return Answer(status, named, body)

    @asynccontextmanager
    async def stream(self, *headers: str) -> AsyncIterator[Callable[[], Awaitable[dict[str, Any] | None]]]:
        """Open the stream of frames. Yield a function that returns the next frame, or None after the last one."""
        reader, writer = await self.open("/events", *headers)
        async with asyncio.timeout(TIMEOUT):
            status, _ = parsed(await reader.readuntil(b"\r\n\r\n"))
        assert status == 200

        async def frame() -> dict[str, Any] | None:
            async with asyncio.timeout(TIMEOUT):
                while True:
                    line = await reader.readline()
                    if line.startswith(b"event: over") or not line:
                        return None
                    if line.startswith(b"data: "):
                        read: dict[str, Any] = json.loads(line[6:])
                        return read

        yield frame
        writer.close()


def parsed(head: bytes) -> tuple[int, dict[str, str]]:
    """The status and the headers of an answer."""
    first, *lines = head.decode("latin-1").split("\r\n")
    return int(first.split()[1]), {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name
    }


def password(token: str) -> str:
    """The header by which a browser gives a password."""
    return f"Authorization: Basic {base64.b64encode(f':{token}'.encode()).decode()}"


@asynccontextmanager
async def served(
    state: PageState,
    host: str = "127.0.0.1",
    token: bytes = b"",
    tls: Tls | None = None,
    tell: Callable[[PageState], Awaitable[None]] | None = None,
    name: str = "",
) -> AsyncIterator[Served]:
    """A page that shows this state at a socket until the end of the context.

    tell: feeds the state with events. name: the host that the user has named.
    """
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # so that little waits in the kernel
        listening.bind((host, 0))
        listening.listen()
        page = Served(state, "127.0.0.1", listening.getsockname()[1])

        async def feed(state: PageState) -> None:
            stopped = asyncio.ensure_future(page.stop.wait())
            telling = asyncio.ensure_future(tell(state)) if tell else stopped
            done, pending = await asyncio.wait((telling, stopped), return_when=asyncio.FIRST_COMPLETED)
            for each in pending:
                each.cancel()
            for each in done:
                each.result()

        serving = asyncio.ensure_future(serve_page(listening, state, feed, token=token, tls=tls, host=name))
        try:
            yield page
        finally:
            page.stop.set()
            await serving
