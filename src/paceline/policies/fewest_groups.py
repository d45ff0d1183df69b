"""The search for the fewest groups that still reach the floor (`r2sp:groups=auto`).

The staleness of M groups is M−1, so fewer groups are better as long as they cost no time. The computation of one group
and its transfers in both directions must fit into a round: compute + 2·(size/N)·R ≤ R, where R is the time of a round.
If this holds for the measured R, the round is as long as the servers' links need, and more groups cannot make it
shorter. Otherwise the search tries more groups, and keeps them if a round becomes shorter by more than 1%.

The search goes upwards from three groups, so that staleness is never higher than necessary. It never tries two groups:
they take the time of pipelined BSP and add staleness.
"""

from __future__ import annotations

import math

MIN_GROUPS = 3


class FewestGroups:
    """Measures rounds and chooses the number of groups."""

    SETTLE = 2  # revolutions until new groups run evenly
    MEASURE = 3  # revolutions to measure
    WORTH = 0.01  # the part by which a round must become shorter

    def __init__(self) -> None:
        self.groups = MIN_GROUPS
        self.restart()

    def restart(self) -> None:
        """Start a new search because the members have changed."""
        self.groups = MIN_GROUPS
        self.settled = False
        self._before: tuple[int, float] | None = None  # the last number of groups, and the time of its round
        self._begin()

    def _begin(self) -> None:
        self._revolutions = 0
        self._began = self._compute = 0.0
        self._turns = 0

    def turn(self, compute_seconds: float) -> None:
        """Note the turn of a group whose slowest member computed for `compute_seconds`."""
        if self._revolutions >= self.SETTLE:
            self._compute += compute_seconds
            self._turns += 1

    def revolution(self, members: int, now: float) -> None:
        """Note that every group has had a turn. `groups` may change."""
        if self.settled:
            return
        self._revolutions += 1
        if self._revolutions == self.SETTLE:
            self._began = now
        if self._revolutions == self.SETTLE + self.MEASURE:
            self._decide((now - self._began) / self.MEASURE, self._compute / max(self._turns, 1), members)
            self._begin()

    def _decide(self, measured: float, compute: float, members: int) -> None:
        size = math.ceil(members / self.groups)
        link_bound = compute + 2 * size / members * measured <= measured
        if self._before is not None and measured > (1 - self.WORTH) * self._before[1]:
            self.groups = self._before[0]
            self.settled = True
        elif link_bound or size == 1:
            self.settled = True
        else:
            self._before = (self.groups, measured)
            self.groups = math.ceil(members / (size - 1))  # the next number that makes the largest group smaller
