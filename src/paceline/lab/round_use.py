"""How much of their time the workers of a run compute, and how fast their bytes go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from paceline.observe.trace import Computed, Event
from paceline.simulate import ClusterSpec
from paceline.simulate.link_use import burst_seconds

Samples = Mapping[int, Sequence[tuple[float, int, int]]]
# For each worker: the time, and the bytes that its host had received and sent by then


def sampling_seconds(spec: ClusterSpec) -> float:
    """Return the time between two samples of byte counters that shows the peaks of a cluster's links."""
    return min(0.5, max(0.02, burst_seconds(spec, "in") / 20))


def computing_shares(events: Sequence[Event], workers: int, warm_up: int) -> tuple[float, ...]:
    """Return for each worker the share of the time in which it computes.

    warm_up: the number of a worker's computations that are left out. A share is of the time between the end of the
    last one of these and the end of the worker's last computation; it is 0 if there is none after them.
    """
    ended: dict[int, list[float]] = {number: [] for number in range(workers)}
    spent: dict[int, list[float]] = {number: [] for number in range(workers)}
    for event in events:
        if isinstance(event, Computed) and event.seconds is not None:
            ended[event.worker].append(event.time)
            spent[event.worker].append(event.seconds)
    shares = []
    for number in range(workers):
        times, seconds = ended[number][max(0, warm_up - 1) :], spent[number][max(0, warm_up - 1) :]
        shares.append(min(1.0, sum(seconds[1:]) / (times[-1] - times[0])) if len(times) > 1 else 0.0)
    return tuple(shares)


def rates(carried: Samples, seconds: tuple[float, float]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the rates at which all workers together send and receive, in bytes per second: the means and the peaks.

    seconds: the times over which the two peaks are taken. If the samples cover no more, a peak is the mean.
    """
    begins = max(samples[0][0] for samples in carried.values())
    ends = min(samples[-1][0] for samples in carried.values())
    times = np.unique([sample[0] for samples in carried.values() for sample in samples])
    times = times[(times >= begins) & (times <= ends)]
    means, peaks = [], []
    for column, window in zip((2, 1), seconds, strict=True):  # sent by the workers, and received by them
        total = np.zeros(len(times))
        for samples in carried.values():
            found = np.array(samples)
            total += np.interp(times, found[:, 0], found[:, column])
        means.append(float((total[-1] - total[0]) / (times[-1] - times[0])) if len(times) > 1 else 0.0)
        peaks.append(_peak(times, total, window) if ends - begins > window else means[-1])
    return (means[0], means[1]), (peaks[0], peaks[1])


def _peak(times: npt.NDArray[np.float64], total: npt.NDArray[np.float64], seconds: float) -> float:
    """Return the largest growth of the total over this many seconds in a row, per second."""
    begins = times[times <= times[-1] - seconds]
    grown = np.interp(begins + seconds, times, total) - np.interp(begins, times, total)
    return float(grown.max() / seconds)
