"""Transfers one after the other, where a policy has workers take turns: the server's link is handed on, not shared.

Shared, ten transfers that began one after the other end all at the same time, late; handed on, each ends as early as it
can, in the order in which they came, and the link carries just as much. Who has nearly got through lets the next begin,
so that the link is never idle. Who gets stuck (a peer that hangs, a link that is cut) delays nobody for long.

How many at a time? As many as it takes to fill the link: one, where workers' links are as fast as the server's; more,
where a worker has several shards to talk to at once, or where its link is slower. That is found out: now and then one
more is let in, and if more gets through in all, it stays so.

Where nobody takes turns, the same bounds how many pushes are received at a time, so that a crowd does not fill the
memory: the others wait in their sockets. Then the number is fixed, and who is slow is given more time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

STUCK = 0.3  # seconds without a byte after which another is let in
GAIN = 1.15  # how much more must get through for one more slot to be worth it
WINDOW = 4  # transfers over which a rate is measured
NEARLY = 1 << 18  # bytes before the end of a transfer, when the next is let begin: the link must not be idle
FIRST_PROBE = 4  # windows before one more is tried; twice as many after each try in vain


class AdmittedTransfer:
    """One transfer that was let in."""

    __slots__ = ("_turnstile", "counts", "moved_at")

    def __init__(self, admission: Admission, now: float) -> None:
        self._turnstile = admission
        self.counts = True  # does it take up a slot?
        self.moved_at = now

    def moved(self, size: int) -> None:
        """So many more bytes have got through."""
        self._turnstile._moved(self, size)

    def leave(self) -> None:
        """It is through, or nearly so: the next may come. Saying it twice does no harm."""
        self._turnstile._leave(self)


class Admission:
    """First come, first served. Any thread may call."""

    def __init__(
        self,
        slots: int = 1,
        clock: Callable[[], float] = time.monotonic,
        *,
        stuck: float = STUCK,
        adapts: bool = True,
    ) -> None:
        """stuck: seconds without a byte after which one is passed by. adapts: may it be more than so many slots?"""
        self.slots = slots
        self._clock, self._stuck = clock, stuck
        self._state = threading.Lock()
        self._inside: set[AdmittedTransfer] = set()
        self._queue: deque[threading.Event] = deque()  # of those who wait, by which each is woken alone
        self._pace = _Pace() if adapts else None

    def enter(self) -> AdmittedTransfer:
        """Wait until it is our turn."""
        called = threading.Event()
        with self._state:
            self._queue.append(called)
            if self._pace:
                self._pace.crowd(self._clock())
        while True:
            with self._state:
                first = self._queue[0] is called
                if first and self._has_room():
                    self._queue.popleft()
                    entered = AdmittedTransfer(self, self._clock())
                    self._inside.add(entered)
                    self._call_next()
                    return entered
                called.clear()
            called.wait(self._stuck / 4 if first else None)  # the first looks whether somebody is stuck

    def _call_next(self) -> None:
        if self._queue:
            self._queue[0].set()

    def _has_room(self) -> bool:
        if len(self._inside) < self.slots:
            return True
        now = self._clock()
        for inside in [inside for inside in self._inside if now - inside.moved_at > self._stuck]:
            self._inside.discard(inside)
            inside.counts = False
        return len(self._inside) < self.slots

    def _moved(self, who: AdmittedTransfer, size: int) -> None:
        who.moved_at = self._clock()
        if self._pace:
            self._pace.moved += size

    def _leave(self, who: AdmittedTransfer) -> None:
        with self._state:
            if who.counts:
                who.counts = False
                self._inside.discard(who)
                if self._pace:
                    self.slots = self._pace.after(self.slots, self._clock(), crowded=bool(self._queue))
                self._call_next()


class _Pace:
    """How much gets through with so many slots, and whether one more would help."""

    def __init__(self) -> None:
        self.moved = 0  # bytes, in this window
        self._since: float | None = None
        self._left = WINDOW
        self._rate = 0.0  # with the usual number of slots
        self._windows = 0
        self._probe_after = FIRST_PROBE
        self._probing = False

    def crowd(self, now: float) -> None:
        """Somebody waits: from here on, what gets through is all that can."""
        if self._since is None:
            self._since, self._left, self.moved = now, WINDOW, 0

    def after(self, slots: int, now: float, crowded: bool) -> int:
        """One more is through. How many slots are there to be now?"""
        if not crowded or self._since is None:
            self._since = None
            return slots - 1 if self._stop_probing() else slots
        self._left -= 1
        if self._left:
            return slots
        rate = self.moved / max(now - self._since, 1e-9)
        self._since, self._left, self.moved = now, WINDOW, 0
        if self._stop_probing():
            if rate > GAIN * self._rate:
                self._rate, self._windows, self._probe_after = rate, 0, FIRST_PROBE
                return slots
            return slots - 1
        self._rate = rate if self._windows == 0 else 0.5 * (self._rate + rate)
        self._windows += 1
        if self._windows >= self._probe_after:
            self._probing, self._windows, self._probe_after = True, 0, 2 * self._probe_after
            return slots + 1
        return slots

    def _stop_probing(self) -> bool:
        was, self._probing = self._probing, False
        return was
