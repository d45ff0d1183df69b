"""The cosine similarity of each update with the sum of all updates that are applied together.

Each shard holds a part of every update. The dot products of the parts (`Products`) add up over the shards, and the
cosines follow from the sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Products:
    """The dot products of updates and of their weighted sum, the "whole"."""

    with_whole: tuple[float, ...]  # each update with the whole
    with_itself: tuple[float, ...]  # each update with itself
    whole: float  # the whole with itself

    @classmethod
    def none(cls, updates: int) -> Products:
        """Return the products of updates without elements."""
        return cls((0.0,) * updates, (0.0,) * updates, 0.0)

    def __add__(self, other: Products) -> Products:
        return Products(
            tuple(a + b for a, b in zip(self.with_whole, other.with_whole, strict=True)),
            tuple(a + b for a, b in zip(self.with_itself, other.with_itself, strict=True)),
            self.whole + other.whole,
        )

    def cosines(self) -> list[float]:
        """Return the cosine of each update with the whole: 0 for an update that is zero or not finite.

        An update is itself a part of the whole. So among n updates that are pure noise of equal length, each cosine is
        1/√n.
        """
        found = []
        for product, square in zip(self.with_whole, self.with_itself, strict=True):
            length = math.sqrt(square) * math.sqrt(self.whole) if square > 0 and self.whole > 0 else 0.0
            found.append(product / length if length > 0 and math.isfinite(product / length) else 0.0)
        return found


def products(
    updates: Sequence[torch.Tensor], weights: Sequence[float], bases: Sequence[torch.Tensor] | None = None
) -> Products:
    """Return the dot products of flat updates and of their weighted sum.

    bases: if the updates are models, the weights that each of them began from. Then the differences are compared.
    """
    import torch  # here, because the coordinator adds up Products without torch

    difference = torch.empty_like(updates[0])  # one at a time, because all of them would double the memory

    def update(at: int) -> torch.Tensor:
        return updates[at] if bases is None else torch.sub(updates[at], bases[at], out=difference)

    whole = torch.zeros_like(updates[0])
    for at, weight in enumerate(weights):
        whole.add_(update(at), alpha=weight)
    both = [torch.stack((each @ whole, each @ each)) for each in map(update, range(len(updates)))]
    found = torch.stack(both).double().tolist()
    return Products(tuple(a for a, _ in found), tuple(b for _, b in found), float(whole @ whole))
