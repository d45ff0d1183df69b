"""The fewest groups that still reach the floor (`r2sp:groups=auto`).

Staleness in M groups is M−1, so fewer are better as long as they cost no time. One group's compute and its transfers,
there and back, must fit into the round: compute + 2·(size/N)·R ≤ R, where R is the time of a round. If that holds for
the R that is measured, the group's own path is not what makes the round long, so the servers' links are, and more
groups cannot help. If it does not hold, more groups are tried, and kept if a round gets shorter by more than 1%.

The search goes upwards from three, so that staleness is never more than it needs to be. Two are never tried: they
match pipelined BSP's time and add staleness.
"""

from __future__ import annotations

import math

MIN_GROUPS = 3


class FewestGroups:
    SETTLE = 2  # revolutions until a new seating runs evenly
    MEASURE = 3  # revolutions that are measured
    WORTH = 0.01  # how much shorter a round must get

    def __init__(self) -> None:
        self.groups = MIN_GROUPS
        self.restart()

    def restart(self) -> None:
        """Search anew: the members have changed."""
        self.groups = MIN_GROUPS
        self.settled = False
        self._before: tuple[int, float] | None = None  # the last number of groups, and its round
        self._begin()

    def _begin(self) -> None:
        self._revolutions = 0
        self._began = self._compute = 0.0
        self._turns = 0

    def turn(self, compute_seconds: float) -> None:
        """A group took its turn; its slowest member computed this long."""
        if self._revolutions >= self.SETTLE:
            self._compute += compute_seconds
            self._turns += 1

    def revolution(self, members: int, now: float) -> None:
        """Everyone has had a turn; `groups` may change."""
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
            self.groups = math.ceil(members / (size - 1))  # the next that makes the largest group smaller
