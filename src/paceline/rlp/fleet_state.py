"""The states of many clusters at once. Each row is what `paceline.rlp.cluster_state` computes for one cluster."""

from __future__ import annotations

import torch

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
from paceline.rlp.fleet import Fleet, FleetTick, Tensor


class FleetState:
    """Keeps what the states of a fleet's clusters are computed from. Tensors have one row for each cluster."""

    def __init__(self, fleet: Fleet, features: StateFeatures) -> None:
        E, N, device = fleet.E, fleet.N, fleet.device
        self._features = features
        self.updates = 0
        self.mean_steps = torch.zeros(E, N, device=device)  # 0: no update yet
        self.frames = torch.zeros(E, features.history, FRAME, device=device)
        self.first, self.fast, self.slow, self.best = (torch.zeros(E, device=device) for _ in range(4))
        self.noise, self.jitter = (torch.zeros(E, device=device) for _ in range(2))
        self.least_transfer = torch.full((E,), torch.inf, device=device)
        self.traffic = torch.zeros(E, 5, device=device)  # running means, as in ClusterState

    def observe(self, fleet: Fleet, tick: FleetTick, validation: Tensor | None = None) -> Tensor:
        """Record the updates of a tick. Return the states (E, size) before any worker is granted.

        validation: losses of a validation batch, to use instead of the workers' own losses.
        """
        self.updates += 1
        self._record_losses(tick.loss if validation is None else validation)
        self._record_steps(tick)
        self._record_traffic(fleet, tick)
        N, loss, slow = fleet.N, self.fast, self.slow
        rounds = torch.full_like(loss, self.updates / N)
        change = loss - (self._before if self._features.validated else slow)
        newest = torch.stack(frame(rounds, loss, self.first, change, tick.staleness.float() / N), 1)
        self.frames = torch.cat([newest[:, None], self.frames[:, :-1]], 1)
        state = self.frames.flatten(1)
        if not self._features.scene:
            return state
        known = (self.mean_steps > 0).sum(1)
        mean = self.mean_steps.sum(1) / known
        inequality = ((self.mean_steps**2).sum(1) / known - mean**2).clamp(min=0).sqrt() / mean
        steps = torch.where(self.mean_steps > 0, self.mean_steps, torch.inf).sort(1).values
        median = steps.gather(1, (known[:, None] - 1) // 2)
        paces = (steps[:, [rank(share, N) for share in SHARES]] / median).clamp(max=UNKNOWN).unbind(1)
        momentum = fleet.momentum[:, 0, 0]
        added = scene(rounds, loss, self.first, slow, self.best, self.noise, inequality, self.jitter, momentum, paces)
        traffic = links(N, self.least_transfer, *self.traffic.unbind(1)) if self._features.links else ()
        return torch.cat([state, torch.stack([*added, *traffic], 1)], 1)

    def keep(self, rows: Tensor) -> None:
        """Drop all clusters but these."""
        for name in (
            "mean_steps",
            "frames",
            "first",
            "fast",
            "slow",
            "best",
            "noise",
            "jitter",
            "traffic",
            "least_transfer",
        ):
            setattr(self, name, getattr(self, name)[rows])

    def _record_losses(self, losses: Tensor) -> None:
        if self.updates == 1:
            self.first = torch.nan_to_num(losses, 1.0).clamp(min=1e-9)
            self.fast, self.slow, self.best = (self.first.clone() for _ in range(3))
        bounded = torch.minimum(torch.nan_to_num(losses, torch.inf, torch.inf), WORST * self.first).clamp(min=1e-9)
        before, newest = self.fast, 1 / self.updates
        self._before = before
        self.fast = bounded if self._features.validated else before + max(FAST, newest) * (bounded - before)
        self.slow = self.slow + max(SLOW, newest) * (bounded - self.slow)
        self.best = torch.minimum(self.best, self.fast)
        self.noise = self.noise + max(FAST, newest) * ((bounded - before).abs() - self.noise)

    def _record_traffic(self, fleet: Fleet, tick: FleetTick) -> None:
        running = fleet.N + 1 - fleet.idle.sum(1)  # this worker counts
        transfer = (tick.iteration_seconds - tick.step_seconds).clamp(min=0)
        self.least_transfer = torch.minimum(self.least_transfer, transfer.float())
        newest = torch.stack([transfer, tick.iteration_seconds, tick.step_seconds, running, tick.seconds], 1).float()
        self.traffic = self.traffic + max(FAST, 1 / self.updates) * (newest - self.traffic)

    def _record_steps(self, tick: FleetTick) -> None:
        seconds, worker = tick.step_seconds.float(), tick.worker[:, None]
        mean = self.mean_steps.gather(1, worker)[:, 0]
        known = mean > 0
        deviation = (seconds - mean).abs() / torch.where(known, mean, 1.0)
        self.jitter = torch.where(known, self.jitter + JITTER_WEIGHT * (deviation - self.jitter), self.jitter)
        mean = torch.where(known, mean + STEP_WEIGHT * (seconds - mean), seconds)
        self.mean_steps.scatter_(1, worker, mean[:, None])
