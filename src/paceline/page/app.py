"""The web application of a page: one HTML file, and its data as server-sent events."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.page.frames import Frames, Viewer
from paceline.page.guard import PageGuard, RefusedRequest

HTML = Path(__file__).with_name("page.html")
TOO_MANY = "Too many viewers: close a page that shows this job elsewhere."
EVENTS = "text/event-stream"
AGAIN = 5  # seconds after which a viewer that was too many asks again


def application(frames: Frames, guard: PageGuard) -> ASGIApp:
    """Return the application that shows these frames to the viewers that the guard lets in."""

    async def page(request: Request) -> Response:
        text, _ = _page()
        return HTMLResponse(text)

    async def events(request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type=EVENTS)
        if viewer := frames.enter():
            return _FrameStream(frames, viewer)
        # A browser hides the text of an error from the page, so this is an event too.
        return Response(f"retry: {1000 * AGAIN}\nevent: refused\ndata: {TOO_MANY}\n\n", media_type=EVENTS)

    routes = [Route("/", page, methods=["GET"]), Route("/events", events, methods=["GET"])]
    return _Guarded(Starlette(routes=routes), guard)


class _Guarded:
    """Checks every request, and adds the headers of safety to every answer."""

    def __init__(self, inner: ASGIApp, guard: PageGuard) -> None:
        self._inner, self._guard = inner, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            key = name.decode("latin-1")
            headers[key] = f"{headers[key]}, {value.decode('latin-1')}" if key in headers else value.decode("latin-1")

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in _safety().items()]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        try:
            self._guard.check(headers, is_data=scope["path"] != "/")
        except RefusedRequest as refusal:
            ask = {"WWW-Authenticate": 'Basic realm="paceline"'} if refusal.status == 401 else {}
            answer = PlainTextResponse(f"{refusal.message}\n", refusal.status, ask)
            return await answer(scope, receive, send_safely)
        await self._inner(scope, receive, send_safely)


class _FrameStream(Response):
    """An answer of server-sent events: one frame after another, each when the viewer has taken the one before.

    It ends when there are no more frames, or when the viewer has gone.
    """

    def __init__(self, frames: Frames, viewer: Viewer) -> None:
        super().__init__(media_type=EVENTS, headers={"X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._frames, self._viewer = frames, viewer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending, leaving = asyncio.ensure_future(self._send(send)), asyncio.ensure_future(_departure(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._frames.leave(self._viewer)
            leaving.cancel()
            sending.cancel()
            with contextlib.suppress(OSError, asyncio.CancelledError):  # the viewer has gone
                await sending

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while frame := await self._frames.next(self._viewer):
            await send({"type": "http.response.body", "body": b"data: " + frame + b"\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"event: over\ndata: \n\n"})


async def _departure(receive: Receive) -> None:
    """Return when the viewer has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


@cache
def _page() -> tuple[str, str]:
    """Return the page, and a policy under which a browser runs only the script and the style in it."""
    text = HTML.read_text()
    sources = {}
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        sources[tag] = f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
    policy = (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


@cache
def _safety() -> dict[str, str]:
    return {
        "content-security-policy": _page()[1],
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-resource-policy": "same-origin",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-store",
    }
