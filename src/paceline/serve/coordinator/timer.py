"""A timer with an accuracy of microseconds.

An event loop may count whole milliseconds. A round of eight turns would lose up to eight of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

WAKE_EARLY = 1.2e-3  # seconds before the deadline at which the loop wakes the timer, which then polls the clock


class Timer:
    """Calls a function once, at the deadline that was set last. Deadlines are in seconds of `time.monotonic`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop, self._callback = loop, callback
        self._handle: asyncio.Handle | None = None
        self._deadline = 0.0

    def set(self, deadline: float) -> None:
        """Call the function at this time. An earlier deadline is cancelled."""
        self.cancel()
        self._deadline = deadline
        self._handle = self._loop.call_at(deadline - WAKE_EARLY, self._check)

    def cancel(self) -> None:
        """Cancel the deadline that was set last."""
        if self._handle:
            self._handle.cancel()
            self._handle = None

    def _check(self) -> None:
        if time.monotonic() < self._deadline:
            self._handle = self._loop.call_soon(self._check)  # let the loop handle other events in between
        else:
            self._handle = None
            self._callback()
