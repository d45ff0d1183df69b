"""The clock of a run. Tests have one of their own, in which a day passes in no time."""

from __future__ import annotations

import time


class RunClock:
    """The system's clock."""

    def now(self) -> float:
        """Return the seconds since some moment in the past."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)
