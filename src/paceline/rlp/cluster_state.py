"""The state of one cluster, as the policy sees it. It consists of plain numbers, so that it can be saved.

`paceline.rlp.fleet_state` computes the same for many clusters at once. A test checks that both agree.
"""

from __future__ import annotations

import math

from paceline.policies import WorkerId
from paceline.rlp.features import (
    FAST,
    FRAME,
    JITTER_WEIGHT,
    SHARES,
    SLOW,
    STEP_WEIGHT,
    UNKNOWN,
    WORST,
    StateFeatures,
    frame,
    links,
    rank,
    scene,
)


class ClusterState:
    """Keeps what the state is computed from. The cost of an update does not depend on the number of workers."""

    def __init__(self, history: int) -> None:
        self.updates = 0
        self.frames = [0.0] * (FRAME * history)  # newest first
        self.losses = 0  # number of losses so far
        self.first = self.fast = self.slow = self.best = 0.0  # the first loss, two running means, and the least mean
        self.noise = 0.0
        self.mean_steps: dict[WorkerId, float] = {}
        self.sum = self.sum_of_squares = 0.0  # of the mean steps
        self.jitter = 0.0
        self.momentum = 0.0  # of the server's optimizer; 0 while unknown
        self.last_arrival: float | None = None
        self.least_transfer: float | None = None
        self.traffic = [0.0] * 5  # running means: transfer, iteration, step, running and gap (features.links)

    def observe(
        self,
        worker: WorkerId,
        members: int,
        staleness: int,
        seconds: float,
        loss: float | None,
        features: StateFeatures,
        granted_at: float,
        now: float,
        running: int,
    ) -> None:
        """Record a worker's update, which has arrived now.

        seconds: the duration of its step. running: the number of workers that were running, this one included.
        """
        self.updates += 1
        self._record_traffic(max(seconds, 1e-9), granted_at, now, running)
        before = self.fast
        if loss is not None:
            self._record_loss(loss, features.validated)
        self._record_step(worker, seconds)
        fast = self.fast or 1.0  # if no worker reports a loss, the loss counts as constant
        change = fast - ((before or fast) if features.validated else (self.slow or 1.0))
        newest = frame(self.updates / members, fast, self.first or 1.0, change, staleness / members)
        self.frames = [*newest, *self.frames[: len(self.frames) - FRAME]]

    def vector(self, members: int, features: StateFeatures) -> list[float]:
        """Return the present state as the network's input."""
        if not features.scene:
            return self.frames
        mean = self.sum / len(self.mean_steps)
        inequality = math.sqrt(max(0.0, self.sum_of_squares / len(self.mean_steps) - mean * mean)) / mean
        steps = sorted(self.mean_steps.values())
        median, ranks = steps[(len(steps) - 1) // 2], (rank(share, members) for share in SHARES)
        paces = [min(steps[at] / median, UNKNOWN) if at < len(steps) else UNKNOWN for at in ranks]
        fast, first, slow, best = (each or 1.0 for each in (self.fast, self.first, self.slow, self.best))
        rounds = self.updates / members
        newest = scene(rounds, fast, first, slow, best, self.noise, inequality, self.jitter, self.momentum, paces)
        traffic = links(members, self.least_transfer or 0.0, *self.traffic) if features.links else ()
        return [*self.frames, *newest, *traffic]

    def forget(self, worker: WorkerId) -> None:
        """Remove a worker that has left."""
        mean = self.mean_steps.pop(worker, None)
        if mean is not None:
            self.sum -= mean
            self.sum_of_squares -= mean * mean

    def _record_loss(self, loss: float, validated: bool) -> None:
        self.losses += 1
        if self.losses == 1:
            self.first = max(loss, 1e-9) if math.isfinite(loss) else 1.0
            self.fast = self.slow = self.best = self.first
        bounded = max(min(loss, WORST * self.first), 1e-9) if loss == loss else WORST * self.first
        before, newest = self.fast, 1 / self.losses
        self.fast = bounded if validated else before + max(FAST, newest) * (bounded - before)
        self.slow += max(SLOW, newest) * (bounded - self.slow)
        self.best = min(self.best, self.fast)
        self.noise += max(FAST, newest) * (abs(bounded - before) - self.noise)

    def _record_traffic(self, seconds: float, granted_at: float, now: float, running: int) -> None:
        iteration = max(seconds, now - granted_at)
        gap = max(0.0, now - (granted_at if self.last_arrival is None else self.last_arrival))
        self.last_arrival = now
        weight, transfer = max(FAST, 1 / self.updates), iteration - seconds
        self.least_transfer = transfer if self.least_transfer is None else min(transfer, self.least_transfer)
        newest = (transfer, iteration, seconds, float(running), gap)
        self.traffic = [mean + weight * (new - mean) for mean, new in zip(self.traffic, newest, strict=True)]

    def _record_step(self, worker: WorkerId, seconds: float) -> None:
        seconds = max(seconds, 1e-9)
        mean = self.mean_steps.get(worker)
        if mean is not None:
            self.forget(worker)
            self.jitter += JITTER_WEIGHT * (abs(seconds - mean) / mean - self.jitter)
            seconds = mean + STEP_WEIGHT * (seconds - mean)
        self.mean_steps[worker] = seconds
        self.sum += seconds
        self.sum_of_squares += seconds * seconds
