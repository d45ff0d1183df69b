"""Streamed: a lull, in which the shards are done with all that they were told of.

A checkpoint must be of one version on all shards, and streamed, each piece moves by itself. So when one is due, what
would begin something new is put off until the last that has begun is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paceline.serve.messages import Identity


class Lull:
    """Updates that the shards may be applying, and what waits for a moment when there are none."""

    def __init__(self) -> None:
        self._under_way: set[Identity] = set()
        self._then: Callable[[], None] | None = None
        self._put_off: list[Callable[[], None]] = []

    @property
    def is_awaited(self) -> bool:
        return self._then is not None

    def begun(self, updates: Iterable[Identity]) -> None:
        """The shards were told of these."""
        self._under_way.update(updates)

    def settled(self, update: Identity) -> None:
        """The shards are done with this one. Of one that never began, it may be said too."""
        self._under_way.discard(update)
        self._if_quiet()

    def unless_awaited(self, do: Callable[[], None]) -> None:
        """Begin something: now, or after the lull that is awaited."""
        if self._then is None:
            do()
        else:
            self._put_off.append(do)

    def once(self, then: Callable[[], None]) -> None:
        """Do this as soon as nothing is under way: at once, if nothing is."""
        self._then = then
        self._if_quiet()

    def _if_quiet(self) -> None:
        if self._then is None or self._under_way:
            return
        then, self._then = self._then, None
        put_off, self._put_off = self._put_off, []
        then()
        for do in put_off:
            do()
