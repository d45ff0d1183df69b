"""Max-min fair sharing of links by flows over arbitrary routes.

Three networks of this package share their links with special cases of the same rule, which are faster where they fit:

- `network.Star`: all flows share one constraint, and workers with equal links have equal rates. A lane stands for
  thousands of flows, and an event changes a few numbers.
- `colocated_network.Mesh`: every flow uses every link, its own link most. The load of a link follows from two counts.
- `visited_network.fair_rates`: a few flows, each over two links. Arrays would cost more than they save.

In a collective every flow has a route of its own, so no shortcut exists there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SAME_SHARE = 1e-9  # shares that differ by less than this fraction are equal


def max_min(
    links: npt.NDArray[np.int64], owner: npt.NDArray[np.int64], flows: int, capacity: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return the max-min fair rate of each flow: none can have more unless a flow with no higher rate gets less.

    `links` and `owner` list which flow uses which link, pair by pair: flow `owner[i]` uses link `links[i]`. `capacity`
    is that of each link.

    This is progressive filling: the link with the smallest equal share fixes the rates of the flows that use it. Then
    the rest of the links is shared by the rest of the flows.
    """
    rates = np.zeros(flows)
    free = np.ones(flows, dtype=bool)
    room = capacity.astype(float).copy()
    while free.any():
        using = free[owner]
        count = np.bincount(links[using], minlength=len(room))
        share = np.where(count > 0, room / np.maximum(count, 1), np.inf)
        least = share.min()
        full = share <= least * (1 + SAME_SHARE)
        stopped = np.zeros(flows, dtype=bool)
        stopped[owner[using & full[links]]] = True
        rates[stopped] = least
        free &= ~stopped
        room -= np.bincount(links[stopped[owner]], minlength=len(room)) * least
        room = np.maximum(room, 0.0)
    return rates
