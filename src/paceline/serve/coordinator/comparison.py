"""How much the updates of one Apply point the same way, put together from what each shard says of its part."""

from __future__ import annotations

from paceline.model.similarity import Products
from paceline.policies import Apply
from paceline.serve.wire.messages import UpdateProducts


class Comparison:
    """Of one Apply."""

    def __init__(self, apply: Apply) -> None:
        self.updates = apply.updates
        self.parts = 0  # shards that have said theirs
        none = (0.0,) * len(apply.updates)
        self._products = Products(none, none, 0.0)

    def fits(self, part: UpdateProducts) -> bool:
        """Is it of as many updates?"""
        return len(part.with_whole) == len(part.with_itself) == len(self.updates)

    def add(self, part: UpdateProducts) -> None:
        self.parts += 1
        self._products += Products(part.with_whole, part.with_itself, part.whole)

    def cosines(self) -> list[float]:
        """When all shards have said theirs."""
        return self._products.cosines()
