"""How full the servers' links of a simulated cluster are: on average, and in the busiest stretch of time."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from paceline.observe.observer import Observer
from paceline.simulate.cluster_spec import ClusterSpec
from paceline.simulate.network import DIRECTIONS, Direction


def burst_seconds(spec: ClusterSpec, direction: Direction) -> float:
    """Return the time in which the servers' links carry one update of each worker, or one model to each.

    Peaks are taken over this time. If all workers exchange at once, the links are full for as long.
    """
    size = spec.update_bytes if direction == "in" else spec.reply_bytes
    return len(spec.workers) * size / spec.capacity(direction)


class LinkUse(Observer):
    """Records which part of the servers' links is in use, in each direction."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {direction: _Record() for direction in DIRECTIONS}

    def used(self, time: float, direction: str, fraction: float) -> None:
        self._records[direction].change(time, fraction)

    def mean(self, direction: Direction, since: float, until: float) -> float:
        """Return the mean use of a direction between two times, as a fraction of the links' rate."""
        if until <= since:
            return 0.0
        begin, end = self._records[direction].totals(np.array([since, until]))
        return min(1.0, float(end - begin) / (until - since))

    def peak(self, direction: Direction, seconds: float, since: float, until: float) -> float:
        """Return the largest mean use of a direction over this many seconds in a row, between two times."""
        if until - since <= seconds:
            return self.mean(direction, since, until)
        record = self._records[direction]
        # The busiest stretch begins or ends where the use changes.
        changes = np.array(record.times)
        begins = np.clip(np.concatenate([changes, changes - seconds]), since, until - seconds)
        return min(1.0, float((record.totals(begins + seconds) - record.totals(begins)).max()) / seconds)


class _Record:
    """A fraction that changes from time to time."""

    def __init__(self) -> None:
        self.times = array("d", [0.0])
        self._totals = array("d", [0.0])  # the integral of the fraction up to each of these times
        self._fraction = 0.0

    def change(self, time: float, fraction: float) -> None:
        self._totals.append(self._totals[-1] + self._fraction * (time - self.times[-1]))
        self.times.append(time)
        self._fraction = fraction

    def totals(self, times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the integral of the fraction up to each of these times."""
        after = np.maximum(0.0, times - self.times[-1])
        result: npt.NDArray[np.float64] = np.interp(times, self.times, self._totals) + self._fraction * after
        return result
