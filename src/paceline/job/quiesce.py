"""Quiescence: a moment at which no update is partly applied.

A checkpoint must hold the same version on all shards. With streaming, the shards apply each piece of an update on its
own. So when a checkpoint is due, orders that would begin a new update are postponed until the last update under way
is settled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from paceline.job.identity import Identity

Order = TypeVar("Order")


class Quiesce(Generic[Order]):
    """The updates that the shards may be applying, and the orders that are postponed until there are none."""

    def __init__(self) -> None:
        self.under_way: set[Identity] = set()
        self.is_awaited = False  # True while orders are postponed
        self._postponed: list[Order] = []

    @property
    def is_quiet(self) -> bool:
        """True if quiescence is awaited and no update is under way."""
        return self.is_awaited and not self.under_way

    def begun(self, updates: Iterable[Identity]) -> None:
        """Record that the shards were ordered to apply these updates."""
        self.under_way.update(updates)

    def settled(self, update: Identity) -> None:
        """Record that the shards have applied or dropped this update. An update that never began is ignored."""
        self.under_way.discard(update)

    def await_quiet(self) -> None:
        """Begin to wait for quiescence. Orders are postponed until `resume`."""
        self.is_awaited = True

    def postpone(self, order: Order) -> None:
        """Postpone an order until `resume`."""
        self._postponed.append(order)

    def resume(self) -> list[Order]:
        """Stop waiting for quiescence, and return the postponed orders in the order they were given."""
        self.is_awaited = False
        orders, self._postponed = self._postponed, []
        return orders
