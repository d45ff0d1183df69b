"""A wake-up call that is on time: event loops count milliseconds, and eight turns a round would lose one each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

EARLY = 1.2e-3  # seconds before the moment that the loop is asked to wake us; the rest is spun away


class Timer:
    """Calls a function once, at the moment that was set last, by `time.monotonic`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop, self._ring = loop, ring
        self._handle: asyncio.Handle | None = None
        self._moment = 0.0

    def set(self, moment: float) -> None:
        self.cancel()
        self._moment = moment
        self._handle = self._loop.call_at(moment - EARLY, self._check)

    def cancel(self) -> None:
        if self._handle:
            self._handle.cancel()
            self._handle = None

    def _check(self) -> None:
        if time.monotonic() < self._moment:
            self._handle = self._loop.call_soon(self._check)  # what has come meanwhile is heard in between
        else:
            self._handle = None
            self._ring()
