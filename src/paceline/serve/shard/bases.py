"""The weights that workers train from. A model that a worker pushes is compared by its difference to them.

Where a policy mixes models and leaves outliers out, the cosines must be those of what the workers have learned. Two
models that began with the same weights are nearly parallel, however different that is. A shard knows which version it
has sent to each worker, so nothing more is sent. Before the weights change, it copies them if a worker trains from
them. A copy is released when neither a worker nor an update that waits needs it. So there are at most as many copies as
workers, and under FL-R²SP about one for each group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeAlias

import torch

Incarnation: TypeAlias = tuple[int, int]  # worker and incarnation


class Bases:
    """The version that each worker trains from, and copies of those versions that are not the newest."""

    def __init__(self) -> None:
        self._pulled: dict[Incarnation, int] = {}  # worker that has not pushed since → the version that it pulled
        self._copies: dict[int, torch.Tensor] = {}  # version → its weights

    def pulled(self, worker: Incarnation, version: int) -> None:
        """Note that a worker trains from this version now."""
        self._pulled[worker] = version

    def take(self, worker: Incarnation) -> int | None:
        """Return the version that a worker's update was computed from, or None if another process had sent it."""
        return self._pulled.pop(worker, None)

    def forget(self, worker: int, before: int) -> None:
        """Forget the incarnations of a worker before this one."""
        for known in [each for each in self._pulled if each[0] == worker and each[1] < before]:
            del self._pulled[known]

    def must_keep(self, version: int, waiting: Collection[int | None]) -> bool:
        """Return whether the newest weights must be copied before they change. waiting: bases of waiting updates."""
        return version not in self._copies and (version in self._pulled.values() or version in waiting)

    def keep(self, version: int, copy: torch.Tensor) -> None:
        """Keep a copy of the weights of this version."""
        self._copies[version] = copy

    def release(self, waiting: Iterable[int | None]) -> list[torch.Tensor]:
        """Forget and return the copies that are no longer needed. waiting: bases of waiting updates."""
        needed = {*self._pulled.values(), *waiting}
        return [self._copies.pop(version) for version in self._copies.keys() - needed]

    def weights(self, versions: Iterable[int | None]) -> list[torch.Tensor] | None:
        """Return the weights of these versions, or None if one of them is not known."""
        found = [None if version is None else self._copies.get(version) for version in versions]
        known = [each for each in found if each is not None]
        return known if len(known) == len(found) else None
