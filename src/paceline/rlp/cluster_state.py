"""The state of one cluster, as the policy sees it: in plain numbers, so that it can be saved and goes anywhere.

`paceline.rlp.fleet_state` makes the same of many clusters at once; a test holds them to it.
"""

from __future__ import annotations

import math

from paceline.policies import WorkerId
from paceline.rlp.features import (
    FAST,
    FRAME,
    SHARES,
    SLOW,
    STEP_WEIGHT,
    UNKNOWN,
    UNSTEADY_WEIGHT,
    WORST,
    StateFeatures,
    frame,
    rank,
    scene,
)


class ClusterState:
    """Remembers what a state is made of. An update costs the same however many workers there are."""

    def __init__(self, history: int) -> None:
        self.updates = 0
        self.frames = [0.0] * (FRAME * history)  # the newest first
        self.first = self.fast = self.slow = self.best = self.rough = 0.0  # losses
        self.heard = 0  # how many there were
        self.mean: dict[WorkerId, float] = {}  # of each worker's steps
        self.total = self.squares = 0.0  # of these means
        self.unsteady = 0.0
        self.momentum = 0.0  # of the server's optimizer, as far as is known

    def see(
        self, worker: WorkerId, members: int, stale: int, seconds: float, loss: float | None, state: StateFeatures
    ) -> None:
        """This worker's update is in."""
        self.updates += 1
        before = self.fast
        if loss is not None:
            self._hear(loss, state.validated)
        self._clock(worker, seconds)
        fast = self.fast or 1.0  # nobody tells a loss: it is as if it stayed the same
        change = fast - ((before or fast) if state.validated else (self.slow or 1.0))
        newest = frame(self.updates / members, fast, self.first or 1.0, change, stale / members)
        self.frames = [*newest, *self.frames[: len(self.frames) - FRAME]]

    def state(self, members: int, state: StateFeatures) -> list[float]:
        """What the network is shown now."""
        if not state.scene:
            return self.frames
        usual = self.total / len(self.mean)
        uneven = math.sqrt(max(0.0, self.squares / len(self.mean) - usual * usual)) / usual
        order = sorted(self.mean.values())
        middle, ranks = order[(len(order) - 1) // 2], (rank(share, members) for share in SHARES)
        paces = [min(order[at] / middle, UNKNOWN) if at < len(order) else UNKNOWN for at in ranks]
        fast, first, slow, best = (each or 1.0 for each in (self.fast, self.first, self.slow, self.best))
        rounds = self.updates / members
        seen = scene(rounds, fast, first, slow, best, self.rough, uneven, self.unsteady, self.momentum, paces)
        return [*self.frames, *seen]

    def forget(self, worker: WorkerId) -> None:
        """It has left."""
        mean = self.mean.pop(worker, None)
        if mean is not None:
            self.total -= mean
            self.squares -= mean * mean

    def _hear(self, loss: float, validated: bool) -> None:
        self.heard += 1
        if self.heard == 1:
            self.first = max(loss, 1e-9) if math.isfinite(loss) else 1.0
            self.fast = self.slow = self.best = self.first
        told = max(min(loss, WORST * self.first), 1e-9) if loss == loss else WORST * self.first
        before, newest = self.fast, 1 / self.heard
        self.fast = told if validated else before + max(FAST, newest) * (told - before)
        self.slow += max(SLOW, newest) * (told - self.slow)
        self.best = min(self.best, self.fast)
        self.rough += max(FAST, newest) * (abs(told - before) - self.rough)

    def _clock(self, worker: WorkerId, seconds: float) -> None:
        seconds = max(seconds, 1e-9)
        own = self.mean.get(worker)
        if own is not None:
            self.forget(worker)
            self.unsteady += UNSTEADY_WEIGHT * (abs(seconds - own) / own - self.unsteady)
            seconds = own + STEP_WEIGHT * (seconds - own)
        self.mean[worker] = seconds
        self.total += seconds
        self.squares += seconds * seconds
