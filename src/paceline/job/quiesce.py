"""Quiescence: a moment at which the shards are done with all that they were told of.

A checkpoint must be of one version on all shards. Streamed, each piece of an update is applied by itself. So when a
checkpoint is due, orders that would begin something new are put off until the last update under way is settled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from paceline.job.identity import Identity

Order = TypeVar("Order")


class Quiesce(Generic[Order]):
    """Updates that the shards may be applying, and the orders that wait for a moment at which there are none."""

    def __init__(self) -> None:
        self.under_way: set[Identity] = set()
        self.is_awaited = False
        self._put_off: list[Order] = []

    @property
    def is_quiet(self) -> bool:
        """Is a quiet moment awaited, and is it now?"""
        return self.is_awaited and not self.under_way

    def begun(self, updates: Iterable[Identity]) -> None:
        """The shards were told of these updates."""
        self.under_way.update(updates)

    def settled(self, update: Identity) -> None:
        """The shards are done with this update. It may never have begun."""
        self.under_way.discard(update)

    def await_quiet(self) -> None:
        """From now on orders are put off, until `resume`."""
        self.is_awaited = True

    def put_off(self, order: Order) -> None:
        """Keep an order until the quiet moment is over."""
        self._put_off.append(order)

    def resume(self) -> list[Order]:
        """The quiet moment is over: the orders that were put off, in order."""
        self.is_awaited = False
        orders, self._put_off = self._put_off, []
        return orders
