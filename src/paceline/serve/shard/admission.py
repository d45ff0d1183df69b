"""Admission: how many transfers use the server's link at a time.

Where a policy makes workers take turns, transfers use the link one after the other instead of sharing it. If ten
transfers that began one after the other shared the link, all of them would end late, at the same time. One after the
other, each ends as early as it can, and the link carries just as much. A transfer that is nearly done admits the next
one, so that the link is never idle. A transfer that is stuck, because its peer hangs or its link is dead, delays the
others only for a short time.

The number of slots is the number of transfers that fill the link. It is one where workers' links are as fast as the
server's. It is more where a worker uses several shards at once, or where its link is slower. Admission finds the number
by trial: now and then it adds a slot, and keeps it if the throughput rises.

Where workers take no turns, admission bounds how many pushes are received at a time, so that many workers do not fill
the memory. The other pushes wait in their sockets. The number of slots is fixed then, and a slow push has more time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

STUCK_SECONDS = 0.3  # without a byte, after which a transfer counts as stuck and loses its slot
GAIN = 1.15  # factor by which the throughput must rise for one more slot to be kept
WINDOW = 4  # transfers over which the throughput is measured
FIRST_PROBE = 4  # windows before one more slot is tried; doubled after each try that fails


class AdmittedTransfer:
    """One transfer that was admitted."""

    __slots__ = ("_admission", "has_slot", "moved_at")

    def __init__(self, admission: Admission, now: float) -> None:
        self._admission = admission
        self.has_slot = True
        self.moved_at = now  # when the last bytes were transferred

    def moved(self, size: int) -> None:
        """Take note that `size` more bytes were transferred."""
        self._admission._moved(self, size)

    def leave(self) -> None:
        """Free the slot for the next transfer. A second call has no effect."""
        self._admission._leave(self)


class Admission:
    """Admits transfers in the order of their requests. Any thread may call."""

    def __init__(
        self,
        slots: int = 1,
        clock: Callable[[], float] = time.monotonic,
        *,
        stuck: float = STUCK_SECONDS,
        adapts: bool = True,
    ) -> None:
        """stuck: seconds without a byte after which a transfer loses its slot. adapts: tune the number of slots."""
        self.slots = slots
        self._clock, self._stuck = clock, stuck
        self._state = threading.Lock()
        self._inside: set[AdmittedTransfer] = set()
        self._queue: deque[threading.Event] = deque()  # one event for each waiting thread, so that each wakes alone
        self._tuner = _SlotTuner() if adapts else None

    def enter(self) -> AdmittedTransfer:
        """Wait for a slot."""
        with self._state:
            if not self._queue and len(self._inside) < self.slots and not self._tuner:
                return self._admit()  # this happens for each piece of an update, and an event is not cheap
        called = threading.Event()
        with self._state:
            self._queue.append(called)
            if self._tuner:
                self._tuner.crowded(self._clock())
        while True:
            with self._state:
                is_first = self._queue[0] is called
                if is_first and self._has_free_slot():
                    self._queue.popleft()
                    entered = self._admit()
                    self._call_next()
                    return entered
                called.clear()
            called.wait(self._stuck / 4 if is_first else None)  # the first in the queue looks for stuck transfers

    def _admit(self) -> AdmittedTransfer:
        entered = AdmittedTransfer(self, self._clock())
        self._inside.add(entered)
        return entered

    def _call_next(self) -> None:
        if self._queue:
            self._queue[0].set()

    def _has_free_slot(self) -> bool:
        """Return whether there is a free slot, if necessary after taking the slots of stuck transfers."""
        if len(self._inside) < self.slots:
            return True
        now = self._clock()
        for transfer in [transfer for transfer in self._inside if now - transfer.moved_at > self._stuck]:
            self._inside.discard(transfer)
            transfer.has_slot = False
        return len(self._inside) < self.slots

    def _moved(self, transfer: AdmittedTransfer, size: int) -> None:
        transfer.moved_at = self._clock()
        if self._tuner:
            self._tuner.moved += size

    def _leave(self, transfer: AdmittedTransfer) -> None:
        with self._state:
            if transfer.has_slot:
                transfer.has_slot = False
                self._inside.discard(transfer)
                if self._tuner:
                    self.slots = self._tuner.after(self.slots, self._clock(), crowded=bool(self._queue))
                self._call_next()


class _SlotTuner:
    """Measures the throughput, and finds out whether one more slot raises it."""

    def __init__(self) -> None:
        self.moved = 0  # bytes in this window
        self._since: float | None = None  # when this window began; None: no transfer waits, so nothing is measured
        self._left = WINDOW  # transfers until this window ends
        self._rate = 0.0  # throughput with the usual number of slots
        self._windows = 0
        self._probe_after = FIRST_PROBE
        self._probing = False

    def crowded(self, now: float) -> None:
        """Begin to measure: a transfer waits, so the link carries as much as it can from now on."""
        if self._since is None:
            self._since, self._left, self.moved = now, WINDOW, 0

    def after(self, slots: int, now: float, crowded: bool) -> int:
        """Count one more transfer that is done, and return the new number of slots."""
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
        """Stop to try one more slot. Return whether one was being tried."""
        was, self._probing = self._probing, False
        return was
