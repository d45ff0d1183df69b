"""How much updates point the same way as those they are applied with.

Of a model that is cut into shards each has a part of every update: the products of the parts add up (`Products`), and
the cosines follow from the sums.
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
    """Of some updates: each with what they come to together, each with itself, and that with itself."""

    with_whole: tuple[float, ...]
    with_itself: tuple[float, ...]
    whole: float

    def __add__(self, other: Products) -> Products:
        return Products(
            tuple(a + b for a, b in zip(self.with_whole, other.with_whole, strict=True)),
            tuple(a + b for a, b in zip(self.with_itself, other.with_itself, strict=True)),
            self.whole + other.whole,
        )

    def cosines(self) -> list[float]:
        """Of each update with the whole. What has no direction, being zero or not finite, has a cosine of 0.

        An update is a part of the whole: even where all are noise, and n are as long, its cosine with it is 1/√n.
        """
        found = []
        for product, square in zip(self.with_whole, self.with_itself, strict=True):
            length = math.sqrt(square) * math.sqrt(self.whole) if square > 0 and self.whole > 0 else 0.0
            found.append(product / length if length > 0 and math.isfinite(product / length) else 0.0)
        return found


def products(updates: Sequence[torch.Tensor], weights: Sequence[float]) -> Products:
    """Of flat updates, and of what they come to together."""
    import torch  # only now: the coordinator adds up without it

    whole = torch.zeros_like(updates[0])
    for update, weight in zip(updates, weights, strict=True):
        whole.add_(update, alpha=weight)
    both = torch.stack([torch.stack((update @ whole, update @ update)) for update in updates]).double().tolist()
    return Products(tuple(a for a, _ in both), tuple(b for _, b in both), float(whole @ whole))
