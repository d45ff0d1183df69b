"""A timer with an accuracy of microseconds, which takes no CPU time while it waits.

An event loop may count whole milliseconds. A round of eight turns would lose up to eight of them. On Linux, a file
descriptor of the kernel becomes readable at the deadline. Elsewhere the event loop's own timer must do.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable

AT_TIME = 1  # TFD_TIMER_ABSTIME: the deadline is a time, not a pause
LEAST = 1e-9  # seconds; the kernel takes 0 for no deadline
PAUSE = 1e-3  # seconds after which an event loop that was too early looks again


class Timer:
    """Calls a function once, at the deadline that was set last. Deadlines are in seconds of `time.monotonic`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop, self._callback = loop, callback
        self._deadline: float | None = None
        self._handle: asyncio.Handle | None = None
        self._kernel = _KernelTimer() if sys.platform == "linux" else None
        if self._kernel:
            loop.add_reader(self._kernel.file, self._ring)

    def set(self, deadline: float) -> None:
        """Call the function at this time. An earlier deadline is cancelled."""
        self.cancel()
        self._deadline = deadline
        if self._kernel:
            self._kernel.set(deadline)
        else:
            self._handle = self._loop.call_at(deadline, self._ring)

    def cancel(self) -> None:
        """Cancel the deadline that was set last."""
        self._deadline = None
        if self._handle:
            self._handle.cancel()
            self._handle = None

    def close(self) -> None:
        """Cancel the deadline. The timer cannot be used any more."""
        self.cancel()
        if self._kernel:
            self._loop.remove_reader(self._kernel.file)
            self._kernel.close()
            self._kernel = None

    def _ring(self) -> None:
        if self._kernel:
            self._kernel.clear()
        if self._deadline is None:
            return  # it was cancelled
        if time.monotonic() >= self._deadline:
            self._deadline = self._handle = None
            self._callback()
        elif not self._kernel:
            self._handle = self._loop.call_later(PAUSE, self._ring)


class _KernelTimer:
    """A timer of the Linux kernel. Its file is readable when the deadline is over, until it is cleared or set again."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.file = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.file < 0:
            raise OSError(ctypes.get_errno(), "cannot create a timer")

    def set(self, deadline: float) -> None:
        seconds, rest = divmod(max(LEAST, deadline), 1.0)
        times = (ctypes.c_long * 4)(0, 0, int(seconds), int(rest * 1e9))  # the interval, and the deadline
        self._libc.timerfd_settime(self.file, AT_TIME, times, None)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was set again meanwhile
            os.read(self.file, 8)

    def close(self) -> None:
        os.close(self.file)
