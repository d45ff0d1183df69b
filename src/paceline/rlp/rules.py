"""The rules that the network chooses among.

A rule says which of the paper's actions to take whenever an update arrives. "Let all idle workers run as soon as a
certain number is idle" is ASP if the number is one, and BSP if it is all workers. SSP bounds the lead of a worker. In
reinforcement learning, such actions that last are called options. The paper's network chooses single actions; they are
rules too, and last for one update.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.policies.components import count_of
from paceline.rlp.features import ALL, ITSELF, NEXT, WAIT

NAMES = {WAIT: "wait", ITSELF: "itself", ALL: "all", NEXT: "next"}


@dataclass(frozen=True)
class Rule:
    """One of three: wait for a share of the workers, bound the lead as SSP does, or always take the same action."""

    share: float = 0.0
    bound: int = -1
    only: int = -1  # an action; of these rules, only turns in a ring make sense for longer than one update

    def __str__(self) -> str:
        if self.only >= 0:
            return NAMES[self.only]
        if self.bound >= 0:
            return f"ssp({self.bound})"
        return "asp" if self.share == 0 else "bsp" if self.share == 1 else f"{self.share:.0%}"

    def quorum(self, workers: int) -> int:
        """Return the number of workers to wait for."""
        return max(1, count_of(self.share, workers))

    def action(self, workers: int, idle: int, lead: int) -> int:
        """Return the action to take.

        idle: the number of idle workers. lead: the progress gap of the worker whose update arrived.
        """
        if self.only >= 0:
            return self.only
        if self.bound < 0:
            return ALL if idle >= self.quorum(workers) else WAIT
        return WAIT if lead > self.bound else ALL if lead == 0 else ITSELF


#: Turns in the order of a ring: an extension, since the paper's actions cannot express turns.
RING = Rule(only=NEXT)
#: The rules that the network chooses among, once a round.
RULES = (*(Rule(each / 10) for each in (0, 2, 3, 4, 5, 6, 7, 8, 9, 10)), Rule(bound=2), Rule(bound=5))
#: The actions that the paper's network chooses among, at every update.
ACTIONS = tuple(Rule(only=action) for action in (WAIT, ITSELF, ALL))


def last_a_round(rules: tuple[Rule, ...]) -> bool:
    """Return whether a choice among these rules lasts a round. A choice among single actions does not."""
    return any(rule.only < 0 for rule in rules)


def parse_rules(names: str) -> tuple[Rule, ...] | None:
    """Return the rules with these names, which commas separate, or None if a name is unknown."""
    known = {str(rule): rule for rule in (*RULES, *ACTIONS, RING)}
    found = [known.get(name) for name in names.split(",")]
    return None if None in found else tuple(rule for rule in found if rule)
