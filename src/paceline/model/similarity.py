"""How much updates point the same way as the mean they are applied in.

Of a model that is cut into shards each has a part of every update: the products of the parts add up (`Products`), and
the cosines follow from the sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Products:
    """Of some updates: each with their mean, each with itself, and the mean with itself."""

    with_mean: tuple[float, ...]
    with_itself: tuple[float, ...]
    mean: float

    def __add__(self, other: Products) -> Products:
        return Products(
            tuple(a + b for a, b in zip(self.with_mean, other.with_mean, strict=True)),
            tuple(a + b for a, b in zip(self.with_itself, other.with_itself, strict=True)),
            self.mean + other.mean,
        )

    def cosines(self) -> list[float]:
        """Of each update with the mean. What has no direction, being zero or not finite, has a cosine of 0."""
        found = []
        for product, square in zip(self.with_mean, self.with_itself, strict=True):
            length = math.sqrt(square) * math.sqrt(self.mean) if square >= 0 and self.mean >= 0 else 0.0
            found.append(product / length if length > 0 and math.isfinite(product) and math.isfinite(length) else 0.0)
        return found


def products(updates: Sequence[torch.Tensor], weights: Sequence[float]) -> Products:
    """Of flat updates, and of what they come to together."""
    mean = torch.zeros_like(updates[0])
    for update, weight in zip(updates, weights, strict=True):
        mean.add_(update, alpha=weight)
    both = torch.stack([torch.stack((update @ mean, update @ update)) for update in updates]).tolist()
    return Products(tuple(a for a, _ in both), tuple(b for _, b in both), float(mean @ mean))
