"""How often a job restarts what was lost: at most so many times, in the whole job or within any time of some length."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
NAMES = {"s": "second", "m": "minute", "h": "hour"}


@dataclass(frozen=True)
class RestartLimit:
    """At most `count` restarts within any `seconds` seconds, or in the whole job if `seconds` is None."""

    count: int
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> RestartLimit:
        """Return the limit that is written 5 (in the whole job) or 5/10m (within any ten minutes; also s and h).

        Raise ValueError for any other text.
        """
        count, slash, window = text.strip().partition("/")
        try:
            seconds = float(window[:-1]) * UNITS[window[-1:]] if slash else None
            if count.isdecimal() and (seconds is None or 0 < seconds < float("inf")):
                return cls(int(count), seconds)
        except (ValueError, KeyError):
            pass
        raise ValueError(f"a number of restarts (5) or a number within a time (5/30s, 5/10m, 5/1h), not {text!r}")

    def __str__(self) -> str:
        if self.seconds is None:
            return f"{self.count}"
        number, unit = _in_units(self.seconds)
        return f"{self.count}/{number:g}{unit}"


#: A fault now and then does not end a job of many days. A process that fails again at once does.
DEFAULT_RESTARTS = RestartLimit(3, 600.0)


class RestartBudget:
    """Counts restarts against a limit. It reads no clock."""

    def __init__(self, limit: RestartLimit) -> None:
        self._limit = limit
        self._times: deque[float] = deque()  # of the restarts that count

    def spend(self, now: float) -> bool:
        """Count a restart at this time and return True, or return False if the limit does not allow one."""
        self._forget(now)
        if len(self._times) >= self._limit.count:
            return False
        self._times.append(now)
        return True

    @property
    def count(self) -> int:
        """The number of restarts that count now."""
        return len(self._times)

    @property
    def used(self) -> str:
        """The restarts that count now, as the end of a sentence, such as "3 times within 10 minutes"."""
        times = "once" if self.count == 1 else f"{self.count} times"
        if self._limit.seconds is None:
            return times
        number, unit = _in_units(self._limit.seconds)
        return f"{times} within {number:g} {NAMES[unit]}{'' if number == 1 else 's'}"

    def _forget(self, now: float) -> None:
        """Forget the restarts that lie outside the window which ends now."""
        if self._limit.seconds is not None:
            while self._times and self._times[0] <= now - self._limit.seconds:
                self._times.popleft()


def _in_units(seconds: float) -> tuple[float, str]:
    """Return a time in the largest unit of which it is a whole number, or else in seconds."""
    unit = next((unit for unit in ("h", "m") if seconds % UNITS[unit] == 0), "s")
    return seconds / UNITS[unit], unit
