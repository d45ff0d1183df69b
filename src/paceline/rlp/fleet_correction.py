"""Correction of staleness in a fleet, for policies that know it in advance (`paceline.model.correction`, *full*)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.rlp.fleet import Fleet, Tensor
from paceline.rlp.instance import Instance
from paceline.workloads.data import Data


class CorrectedFleet(Fleet):
    """A fleet whose momentum decays once per round, and whose workers pull predicted weights.

    Set `turns` (E,), the number of steps in a round, before `apply`. Set `ahead` (E, N), the number of steps for which
    the weights are predicted, before `grant`. Clusters without momentum are not corrected.
    """

    def __init__(self, instances: Sequence[Instance], data: Data, device: str = "cpu") -> None:
        super().__init__(instances, data, device)
        # `velocities` collects the gradients until they are applied. These hold the momentum, and the newest gradient.
        self._buffers = [torch.zeros_like(layer) for layer in self.layers]
        self._newest = [torch.zeros_like(layer) for layer in self.layers]
        self._decay, self._slow_rate = self.momentum, self.rate  # in the last step
        self.turns = torch.ones(self.E, device=self.device)
        self.ahead = torch.zeros(self.E, self.N, device=self.device)

    def apply(self, where: Tensor) -> None:
        """Apply the gradients that have arrived, in the clusters where (E,) is true."""
        chosen = where[:, None, None]
        slow = self.momentum ** (1 / self.turns[:, None, None])
        rate = self.rate * (1 - slow) / (1 - self.momentum)
        self._decay = torch.where(chosen, slow, self._decay)
        self._slow_rate = torch.where(chosen, rate, self._slow_rate)
        for layer, gradient, buffer, newest in zip(
            self.layers, self.velocities, self._buffers, self._newest, strict=True
        ):
            buffer.copy_(torch.where(chosen, slow * buffer + gradient, buffer))
            newest.copy_(torch.where(chosen, gradient, newest))
            layer.sub_(torch.where(chosen, rate * buffer, 0.0))
            gradient.mul_(~chosen)

    def keep(self, rows: Tensor) -> None:
        """Drop all clusters but these."""
        super().keep(rows)
        for name in ("_decay", "_slow_rate", "turns", "ahead"):
            setattr(self, name, getattr(self, name)[rows])
        for models in (self._buffers, self._newest):
            for index in range(len(models)):
                models[index] = models[index][rows]

    def _pull(self, rows: Tensor, columns: Tensor) -> None:
        super()._pull(rows, columns)
        if not self.updates:
            return
        # In j steps with gradient g, momentum v decays to βʲ·v and gains g·(1−βʲ)/(1−β), as in `drift`.
        beta, rate, steps = self._decay[rows], self._slow_rate[rows], self.ahead[rows, columns][:, None, None]
        decayed = beta * (1 - beta**steps) / (1 - beta)
        of_gradient = torch.where(beta > 0, (steps - decayed) / (1 - beta), 0.0)
        for pulled, buffer, newest in zip(self.pulled, self._buffers, self._newest, strict=True):
            index = rows * self.N + columns
            pulled.flatten(0, 1).index_add_(0, index, buffer[rows].mul_(-rate * decayed))
            pulled.flatten(0, 1).index_add_(0, index, newest[rows].mul_(-rate * of_gradient))
