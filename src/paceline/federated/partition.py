"""Whose samples are which: label skew by Dirichlet distributions (Yurochkin et al. 2019), as the FL-R²SP paper has it.

Each client's classes are drawn from a Dirichlet distribution of its own. With α = 10 a client has about as much of
every class; with α = 0.1 two thirds of its samples are of one, on average, and it is an outlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.simulate.task import TrainingError


@dataclass(frozen=True)
class Skew:
    """Some clients are as most are, some are outliers. The paper: three quarters with α = 10, a quarter with 0.1."""

    outliers: float = 0.25  # of the clients
    usual: float = 10.0  # α
    odd: float = 0.1  # α of outliers

    def alphas(self, clients: int, seed: int) -> list[float]:
        """Each client's α. Which of them are outliers is drawn from the seed."""
        order = torch.randperm(clients, generator=torch.Generator().manual_seed(seed)).tolist()
        odd = set(order[: round(self.outliers * clients)])
        return [self.odd if client in odd else self.usual for client in range(clients)]


def dirichlet(labels: torch.Tensor, alphas: Sequence[float], samples: int, seed: int) -> list[torch.Tensor]:
    """So many samples for each client, its classes drawn with its α.

    Within a class samples are dealt out in a shuffled order, and a second time only once all have been.
    """
    if not alphas or samples < 1 or not all(alpha > 0 for alpha in alphas):
        raise TrainingError("Samples are dealt to one client at least, to each at least one, with an α greater than 0.")
    chance = torch.Generator().manual_seed(seed)
    classes = int(labels.max()) + 1
    decks = [_Deck(torch.nonzero(labels == label).flatten(), chance) for label in range(classes)]
    present = torch.tensor([float(len(deck.cards) > 0) for deck in decks])
    shares = []
    for alpha in alphas:
        # torch draws Dirichlet from the global state only; two lines of gamma variates do not.
        gammas = torch._standard_gamma(torch.full((classes,), alpha, dtype=torch.float64), generator=chance)
        odds = (gammas + 1e-300) * present
        drawn = torch.multinomial(odds / odds.sum(), samples, replacement=True, generator=chance)
        counts = torch.bincount(drawn, minlength=classes).tolist()
        shares.append(torch.cat([deck.deal(count) for deck, count in zip(decks, counts, strict=True)]))
    return shares


class _Deck:
    """The samples of one class."""

    def __init__(self, cards: torch.Tensor, chance: torch.Generator) -> None:
        self.cards, self._chance = cards, chance
        self._left = cards[:0]

    def deal(self, count: int) -> torch.Tensor:
        while len(self._left) < count:
            self._left = torch.cat([self._left, self.cards[torch.randperm(len(self.cards), generator=self._chance)]])
        dealt, self._left = self._left[:count], self._left[count:]
        return dealt
