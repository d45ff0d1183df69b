"""Frames for the viewers of a page: the changes since the last frame, ten times a second at most.

A viewer asks for its next frame when it has sent the one before. If it is slow, it misses frames, and then gets one
frame with everything. So nothing is kept for a viewer but the one frame that is being sent to it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from paceline.page.state import PageState

FRAME = 0.1  # seconds between two frames at least
SLOW = 0.5  # seconds between two frames with sentences and figures at least
SHARE = 0.05  # of the time that frames may take; they become rarer if they take longer
AGAIN = 1.0  # seconds between two whole frames for the same viewer
MAX_VIEWERS = 64

_encode = msgspec.json.Encoder(enc_hook=str).encode


class Viewer:
    """One open page."""

    def __init__(self) -> None:
        self.seen = -1  # the number of the last frame that it was given
        self.whole_at = -AGAIN  # when it was given everything
        self.ready: asyncio.Future[bytes] | None = None  # set while it waits for its next frame


class Frames:
    """Makes the frames, and gives them to all viewers."""

    def __init__(self, state: PageState, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = state
        self.viewers: set[Viewer] = set()
        self.number = 0
        self.dropped = 0  # frames that a viewer was too slow for
        self.is_over = False  # no frame will follow
        self._clock = clock
        self._slow_at = -SLOW
        self._events = -1  # of the state, at the last frame

    def enter(self) -> Viewer | None:
        """Return a new viewer, or None if there are too many."""
        if len(self.viewers) >= MAX_VIEWERS:
            return None
        viewer = Viewer()
        self.viewers.add(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        self.viewers.discard(viewer)

    async def next(self, viewer: Viewer) -> bytes:
        """Return the viewer's next frame, as JSON. An empty one: there are no more."""
        if self.is_over and viewer.seen == self.number:
            return b""
        ready: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        viewer.ready = ready
        if self.is_over:
            self._give(viewer, _encode(self._whole()), self._clock())
        return await ready

    async def keep_making(self) -> None:
        """Make frames until `finish` is called."""
        while not self.is_over:
            took = self.make()
            await asyncio.sleep(max(FRAME, took / SHARE))

    def make(self) -> float:
        """Make a frame, if anything has changed, for the viewers that are ready. Return the seconds that it took."""
        began = self._clock()
        is_slow = began - self._slow_at >= SLOW
        if not is_slow and self.state.events == self._events and not self._newcomers():
            return 0.0
        self._slow_at = began if is_slow else self._slow_at
        self._events = self.state.events
        self.number += 1
        changes = self.state.changes(is_slow and bool(self.viewers))
        waiting = [viewer for viewer in self.viewers if viewer.ready and not viewer.ready.done()]
        self.dropped += len(self.viewers) - len(waiting)
        delta = whole = b""
        for viewer in waiting:
            if viewer.seen == self.number - 1:
                delta = delta or _encode(changes | {"n": self.number})
                self._give(viewer, delta, None)
            elif began - viewer.whole_at >= AGAIN:
                whole = whole or _encode(self._whole())
                self._give(viewer, whole, began)
        return self._clock() - began

    def finish(self) -> None:
        """Give every viewer that is ready a last frame, with everything. Then it gets no more."""
        if self.is_over:
            return
        self.number += 1
        self.is_over = True
        whole = _encode(self._whole())
        for viewer in self.viewers:
            if viewer.ready and not viewer.ready.done():
                self._give(viewer, whole, self._clock())

    def _newcomers(self) -> bool:
        return any(viewer.seen < 0 and viewer.ready for viewer in self.viewers)

    def _whole(self) -> dict[str, object]:
        return self.state.snapshot() | {"n": self.number, "over": self.is_over}

    def _give(self, viewer: Viewer, frame: bytes, whole_at: float | None) -> None:
        viewer.seen = self.number
        if whole_at is not None:
            viewer.whole_at = whole_at
        assert viewer.ready is not None
        viewer.ready.set_result(frame)
        viewer.ready = None
