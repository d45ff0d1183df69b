"""The grid that a wrapped strategy sees when it makes the message to train from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from flwr.serverapp import Grid


class _AllNodes:
    """A grid whose nodes are all that were ever connected.

    A strategy waits until enough nodes are connected, and then chooses some. Here the policy has chosen already, and a
    node that has left must not make all others wait. So a strategy waits only until enough nodes were seen.
    """

    def __init__(self, grid: Grid, known: set[int]) -> None:
        self._grid, self._known = grid, known

    def get_node_ids(self) -> Iterable[int]:
        return self._known | set(self._grid.get_node_ids())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)


def all_nodes(grid: Grid, known: Iterable[int]) -> Grid:
    """Return a grid whose nodes are the connected and the known ones."""
    return cast(Grid, _AllNodes(grid, set(known)))
