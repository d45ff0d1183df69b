"""The state of many clusters at once, row by row what `paceline.learn.policy` makes of one."""

from __future__ import annotations

import torch

from paceline.learn.features import FAST, FRAME, SCENE, SLOW, STEP_WEIGHT, WORST, frame, scene
from paceline.learn.fleet import Fleet, Tensor, Tick


class Watch:
    """Looks at a fleet. loss: from the workers' reports or, given with every tick, from a validation batch."""

    def __init__(self, fleet: Fleet, history: int, with_scene: bool, validated: bool) -> None:
        E, N, device = fleet.E, fleet.N, fleet.device
        self.history, self.with_scene, self.validated = history, with_scene, validated
        self.n = 0
        self.mean = torch.zeros(E, N, device=device)  # of each worker's steps; 0 until there is one
        self.frames = torch.zeros(E, history, FRAME, device=device)
        self.first, self.fast, self.slow, self.best = (torch.zeros(E, device=device) for _ in range(4))
        self.unsteady = torch.zeros(E, device=device)
        self.rough = torch.zeros(E, device=device)

    @property
    def size(self) -> int:
        return size(self.history, self.with_scene)

    def see(self, fleet: Fleet, tick: Tick, validation: Tensor | None = None) -> Tensor:
        """The states (E, size) after an arrival, before anybody is let go."""
        self.n += 1
        rows, N = torch.arange(fleet.E, device=fleet.device), fleet.N
        took = tick.took.float()
        # Losses
        told = validation if validation is not None else tick.loss
        if self.n == 1:
            self.first = torch.nan_to_num(told, 1.0).clamp(min=1e-9)
            self.fast, self.slow, self.best = (self.first.clone() for _ in range(3))
        told = torch.minimum(torch.nan_to_num(told, torch.inf, torch.inf), WORST * self.first).clamp(min=1e-9)
        before = self.fast
        self.fast = told if self.validated else before + max(FAST, 1 / self.n) * (told - before)
        self.slow = self.slow + max(SLOW, 1 / self.n) * (told - self.slow)
        self.best = torch.minimum(self.best, self.fast)
        self.rough = self.rough + max(FAST, 1 / self.n) * ((told - before).abs() - self.rough)
        change = self.fast - (before if self.validated else self.slow)
        rounds = torch.full_like(took, self.n / N)
        newest = torch.stack(frame(rounds, self.fast, self.first, change, tick.stale.float() / N), 1)
        self.frames = torch.cat([newest[:, None], self.frames[:, :-1]], 1)
        state = self.frames.flatten(1)
        if not self.with_scene:
            return state
        # Steps
        own = self.mean[rows, tick.worker]
        known = own > 0
        off = (took - own).abs() / torch.where(known, own, 1.0)
        self.unsteady = torch.where(known, self.unsteady + 0.05 * (off - self.unsteady), self.unsteady)
        own = torch.where(known, own + STEP_WEIGHT * (took - own), took)
        self.mean[rows, tick.worker] = own
        heard = (self.mean > 0).sum(1)
        usual = self.mean.sum(1) / heard
        uneven = ((self.mean**2).sum(1) / heard - usual**2).clamp(min=0).sqrt() / usual
        seen = scene(rounds, self.fast, self.first, self.slow, self.best, self.rough, uneven, self.unsteady)
        return torch.cat([state, torch.stack(seen, 1)], 1)

    def keep(self, rows: Tensor) -> None:
        """Go on with these clusters alone."""
        for name in ("mean", "frames", "first", "fast", "slow", "best", "unsteady", "rough"):
            setattr(self, name, getattr(self, name)[rows])


def size(history: int, with_scene: bool) -> int:
    """How many figures a state has."""
    return FRAME * history + SCENE * with_scene
