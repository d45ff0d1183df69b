"""The state of many clusters at once: row by row what `paceline.rlp.cluster_state` makes of one."""

from __future__ import annotations

import torch

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
from paceline.rlp.fleet import Fleet, FleetTick, Tensor


class FleetState:
    """Looks at a fleet."""

    def __init__(self, fleet: Fleet, state: StateFeatures) -> None:
        E, N, device = fleet.E, fleet.N, fleet.device
        self._state = state
        self.n = 0
        self.mean = torch.zeros(E, N, device=device)  # of each worker's steps; 0 until there is one
        self.frames = torch.zeros(E, state.history, FRAME, device=device)
        self.first, self.fast, self.slow, self.best = (torch.zeros(E, device=device) for _ in range(4))
        self.rough, self.unsteady = (torch.zeros(E, device=device) for _ in range(2))

    def see(self, fleet: Fleet, tick: FleetTick, validation: Tensor | None = None) -> Tensor:
        """The states (E, size) after an arrival, before anybody is let go."""
        self.n += 1
        self._hear(tick.loss if validation is None else validation)
        self._clock(tick)
        N, loss, slow = fleet.N, self.fast, self.slow
        rounds = torch.full_like(loss, self.n / N)
        change = loss - (self._before if self._state.validated else slow)
        newest = torch.stack(frame(rounds, loss, self.first, change, tick.stale.float() / N), 1)
        self.frames = torch.cat([newest[:, None], self.frames[:, :-1]], 1)
        state = self.frames.flatten(1)
        if not self._state.scene:
            return state
        heard = (self.mean > 0).sum(1)
        usual = self.mean.sum(1) / heard
        uneven = ((self.mean**2).sum(1) / heard - usual**2).clamp(min=0).sqrt() / usual
        order = torch.where(self.mean > 0, self.mean, torch.inf).sort(1).values
        middle = order.gather(1, (heard[:, None] - 1) // 2)
        paces = (order[:, [rank(share, N) for share in SHARES]] / middle).clamp(max=UNKNOWN).unbind(1)
        momentum = fleet.momentum[:, 0, 0]
        seen = scene(rounds, loss, self.first, slow, self.best, self.rough, uneven, self.unsteady, momentum, paces)
        return torch.cat([state, torch.stack(seen, 1)], 1)

    def _hear(self, told: Tensor) -> None:
        """Of a loss."""
        if self.n == 1:
            self.first = torch.nan_to_num(told, 1.0).clamp(min=1e-9)
            self.fast, self.slow, self.best = (self.first.clone() for _ in range(3))
        told = torch.minimum(torch.nan_to_num(told, torch.inf, torch.inf), WORST * self.first).clamp(min=1e-9)
        before = self._before = self.fast
        self.fast = told if self._state.validated else before + max(FAST, 1 / self.n) * (told - before)
        self.slow = self.slow + max(SLOW, 1 / self.n) * (told - self.slow)
        self.best = torch.minimum(self.best, self.fast)
        self.rough = self.rough + max(FAST, 1 / self.n) * ((told - before).abs() - self.rough)

    def _clock(self, tick: FleetTick) -> None:
        """How long a step took."""
        took, came = tick.took.float(), tick.worker[:, None]
        own = self.mean.gather(1, came)[:, 0]
        known = own > 0
        off = (took - own).abs() / torch.where(known, own, 1.0)
        self.unsteady = torch.where(known, self.unsteady + UNSTEADY_WEIGHT * (off - self.unsteady), self.unsteady)
        own = torch.where(known, own + STEP_WEIGHT * (took - own), took)
        self.mean.scatter_(1, came, own[:, None])

    def keep(self, rows: Tensor) -> None:
        """Go on with these clusters alone."""
        for name in ("mean", "frames", "first", "fast", "slow", "best", "rough", "unsteady"):
            setattr(self, name, getattr(self, name)[rows])
