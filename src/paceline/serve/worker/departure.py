"""SIGTERM asks a worker to leave: it finishes the push of its gradient, leaves the job, and ends with exit code 143.

Schedulers send SIGTERM some time before they take a machine away. The update of the worker then counts, the others do
not wait for a lease, and the job expects the worker back for a while. A second SIGTERM ends the process at once. In an
actor of Ray, which has its own handler of SIGTERM, `ask_to_leave` asks the worker instead.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType

from paceline.serve.environment import ASKED_TO_LEAVE, LAUNCHED, RUN
from paceline.serve.worker.notices import notice

#: Seconds within which several signals count as one: a scheduler may signal a worker and also `paceline work`, which
#: passes the signal on.
REPEATED = 1.0


class Departed(SystemExit):
    """This worker was asked to leave the job, and it has nothing more to push."""

    def __init__(self) -> None:
        super().__init__(ASKED_TO_LEAVE)


class Departure:
    """Whether this process was asked to leave the job."""

    def __init__(self) -> None:
        self.asked = False
        self._when = 0.0  # the first signal came
        self._process = os.getpid()
        self._wake: Callable[[], None] = lambda: None

    @classmethod
    def at_sigterm(cls) -> Departure:
        """Return a departure that SIGTERM asks for, if the script has no handler of its own.

        Workers of `paceline run` are not asked, because the command ends the whole job.
        """
        departure = cls()
        departure.asked = _asked.is_set()
        _living.add(departure)
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and os.environ.get(LAUNCHED) != RUN and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, departure._receive)
        return departure

    def wakes(self, wake: Callable[[], None]) -> None:
        """Call this function, in another thread, once the process is asked to leave."""
        self._wake = wake

    def check(self) -> None:
        """Raise Departed if this process was asked to leave."""
        if self.asked:
            raise Departed

    def release(self) -> None:
        """Let SIGTERM end the process at once, as it does without a job."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) == self._receive:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if os.getpid() != self._process or (self.asked and now - self._when > REPEATED):
            signal.signal(number, signal.SIG_DFL)  # a child that the script has forked, or a second signal
            os.kill(os.getpid(), number)
        elif not self.asked:
            self.asked, self._when = True, now
            # In a thread, because the code that the signal has interrupted may hold a lock or be printing.
            threading.Thread(target=self._tell, args=("SIGTERM",), daemon=True, name="paceline departure").start()

    def _tell(self, why: str) -> None:
        notice(f"{why}: this worker leaves the job after its push.")
        self._wake()


_living: weakref.WeakSet[Departure] = weakref.WeakSet()  # those that a signal may ask for
_asked = threading.Event()  # set by `ask_to_leave`, also for workers that have not joined yet


def ask_to_leave(why: str) -> None:
    """Ask the worker of this process to leave, as SIGTERM does. Any thread may call this."""
    _asked.set()
    for departure in list(_living):
        if not departure.asked:
            departure.asked = True
            departure._tell(why)
