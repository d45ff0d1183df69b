"""Batch-size tuning (R²SP, INFOCOM 2019, section IV): a faster worker uses its idle time to compute more samples.

The paper grows a worker's batch by its idle time × its speed. With 429, 628 and 917 samples a second and a batch of
512, blocking times of 0, 0.62 and 0.82 s give batches of 512, 901 and 1264 (table II). Three rules are added so that
the batches settle:
 - Idle time is counted relative to the least idle worker, that is, from the time that the slowest worker takes *with
   its own batch* (the reference). Otherwise a ring that waits for the network would inflate every batch, and growing
   workers would chase each other.
 - A batch changes only if the idle time is larger than the noise of the measurement.
 - Each change of a worker's batch doubles the number of observations that its next change needs.
"""

from __future__ import annotations

import math

from paceline.policies.components import RecentMax
from paceline.policies.contract import Update, WorkerId


class _WorkerTimes:
    """The measurements of one worker since its batch last changed."""

    __slots__ = ("batch", "busy", "changes", "count", "own", "speed", "variance")

    def __init__(self, batch: int) -> None:
        self.own = self.batch = batch
        self.changes = 0
        self.restart(batch)

    def restart(self, batch: int) -> None:
        self.batch = batch
        self.count = 0
        self.busy = self.variance = self.speed = 0.0


class BatchTuner:
    """Chooses batch sizes so that every member takes as long as the slowest takes with its own batch."""

    FIRST = 4  # observations before the first change
    MEMORY = 64  # observations in the moving means
    NOISE = 2.0  # standard errors that count as noise
    SMALLEST = 0.005  # a smaller idle time, in units of the reference, is not worth a change

    def __init__(self, max_growth: float) -> None:
        self.max_growth = max_growth
        self._workers: dict[WorkerId, _WorkerTimes] = {}
        self._reference = RecentMax()

    def set_own(self, worker: WorkerId, batch_size: int) -> None:
        """Note the batch size that a worker computes if a Grant names none."""
        self._workers.setdefault(worker, _WorkerTimes(batch_size))

    def observe(self, update: Update, busy_seconds: float) -> None:
        """Observe an iteration that took `busy_seconds` from its Grant to its arrival.

        If a worker's own batch size was not reported, that of its first update is taken for it.
        """
        worker = self._workers.get(update.worker)
        if worker is None:
            worker = self._workers[update.worker] = _WorkerTimes(update.batch_size)
        if update.batch_size != worker.batch:
            return  # it was granted before the last change, or is the rest of an epoch
        worker.count += 1
        share = 1.0 / min(worker.count, self.MEMORY)
        deviation = busy_seconds - worker.busy
        worker.busy += share * deviation
        worker.variance = (1.0 - share) * (worker.variance + share * deviation * deviation)
        if update.compute_seconds > 0:
            worker.speed += share * (update.batch_size / update.compute_seconds - worker.speed)
        if worker.count >= self.FIRST and worker.speed > 0:
            at_own_batch = worker.busy - (worker.batch - worker.own) / worker.speed
            self._reference.see(at_own_batch - self._noise(worker), len(self._workers))

    def batch(self, worker_id: WorkerId) -> int | None:
        """Return the batch size to grant; None while the worker's own is unknown."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return None
        reference = self._reference.value
        wanted = min(self.FIRST << worker.changes, self.MEMORY)
        if worker.count < wanted or worker.speed <= 0 or not reference:
            return worker.batch
        idle = reference - worker.busy
        if abs(idle) <= max(self._noise(worker), self.SMALLEST * reference):
            return worker.batch
        grown = round(worker.batch + idle * worker.speed)
        grown = min(max(grown, worker.own), int(worker.own * self.max_growth))
        if grown != worker.batch:
            worker.changes += 1
            worker.restart(grown)
        return grown

    def forget(self, worker_id: WorkerId) -> None:
        self._workers.pop(worker_id, None)

    def _noise(self, worker: _WorkerTimes) -> float:
        """Return how far the mean busy time may be off by chance."""
        return self.NOISE * math.sqrt(worker.variance / min(worker.count, self.MEMORY))
