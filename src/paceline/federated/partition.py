"""Partition a data set among clients with label skew by Dirichlet distributions (Yurochkin et al. 2019).

The FL-R²SP paper uses this partition. The classes of each client are drawn from its own Dirichlet distribution. With
α = 10 a client has about the same number of samples of every class. With α = 0.1 two thirds of its samples are of one
class on average, and it is an outlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.policies.components import count_of
from paceline.simulate.task import TrainingError


@dataclass(frozen=True)
class Skew:
    """The label skew of a federation. In the paper, three quarters of the clients have α = 10 and a quarter 0.1."""

    outliers: float = 0.25  # share of the clients
    usual: float = 10.0  # α of most clients
    odd: float = 0.1  # α of outliers

    def alphas(self, clients: int, seed: int) -> list[float]:
        """Return the α of each client. The seed decides which clients are outliers."""
        order = torch.randperm(clients, generator=torch.Generator().manual_seed(seed)).tolist()
        odd = set(order[: count_of(self.outliers, clients)])
        return [self.odd if client in odd else self.usual for client in range(clients)]


def dirichlet(labels: torch.Tensor, alphas: Sequence[float], samples: int, seed: int) -> list[torch.Tensor]:
    """Return the sample numbers of each client: `samples` of them, with classes drawn according to its α.

    Within a class, samples are assigned in a shuffled order. A sample is assigned a second time only after all others.
    """
    if not alphas or samples < 1 or not all(alpha > 0 for alpha in alphas):
        raise TrainingError(
            "A partition needs at least one client, at least one sample for each, and an α greater than 0."
        )
    generator = torch.Generator().manual_seed(seed)
    classes = int(labels.max()) + 1
    pools = [_SamplePool(torch.nonzero(labels == label).flatten(), generator) for label in range(classes)]
    present = torch.tensor([float(len(pool.samples) > 0) for pool in pools])
    shares = []
    for alpha in alphas:
        # torch's Dirichlet distribution uses the global generator, so this draws normalized gamma variates instead.
        gammas = torch._standard_gamma(torch.full((classes,), alpha, dtype=torch.float64), generator=generator)
        odds = (gammas + 1e-300) * present
        drawn = torch.multinomial(odds / odds.sum(), samples, replacement=True, generator=generator)
        counts = torch.bincount(drawn, minlength=classes).tolist()
        shares.append(torch.cat([pool.take(count) for pool, count in zip(pools, counts, strict=True)]))
    return shares


class _SamplePool:
    """The samples of one class, in shuffled order."""

    def __init__(self, samples: torch.Tensor, generator: torch.Generator) -> None:
        self.samples, self._generator = samples, generator
        self._left = samples[:0]

    def take(self, count: int) -> torch.Tensor:
        """Remove and return the next samples. An empty pool is filled and shuffled again."""
        while len(self._left) < count:
            order = torch.randperm(len(self.samples), generator=self._generator)
            self._left = torch.cat([self._left, self.samples[order]])
        taken, self._left = self._left[:count], self._left[count:]
        return taken
