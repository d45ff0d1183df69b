"""Compare the updates of one Apply: combine the dot products that each shard computes for its part."""

from __future__ import annotations

from paceline.model.similarity import Products
from paceline.policies import Apply
from paceline.serve.wire.messages import UpdateProducts


class Comparison:
    """The comparison of the updates of one Apply."""

    def __init__(self, apply: Apply) -> None:
        self.updates = apply.updates
        self.shards: set[int] = set()  # whose products are added
        self._products = Products.none(len(apply.updates))

    def fits(self, part: UpdateProducts) -> bool:
        """Return whether a shard's products are of the same number of updates."""
        return len(part.with_whole) == len(part.with_itself) == len(self.updates)

    def add(self, shard: int, part: UpdateProducts) -> None:
        """Add one shard's products. The backup of a shard computes the same ones, which count once."""
        if shard in self.shards:
            return
        self.shards.add(shard)
        self._products += Products(part.with_whole, part.with_itself, part.whole)

    def cosines(self) -> list[float]:
        """Return the cosine of each update with their sum. The products of all shards must have been added."""
        return self._products.cosines()
