"""The rules that the network chooses among.

A rule says which of the paper's actions to take whenever an update arrives. "Let all idle workers run as soon as a
certain number is idle" is ASP if the number is one, and BSP if it is all workers. SSP bounds the lead of a worker. In
reinforcement learning, such actions that last are called options. The paper's network chooses single actions; they are
rules too, and last for one update.

Two kinds of rules go beyond the paper's actions. "At most three workers run" lets the worker run that has been idle
longest. Where workers share a link, a few of them keep it busy; more would only make updates stale. Turns in a ring are
the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from paceline.policies.components import count_of
from paceline.rlp.features import ALL, ITSELF, NEXT, WAIT, longest_idle

NAMES = {WAIT: "wait", ITSELF: "itself", ALL: "all", NEXT: "next"}


@dataclass(frozen=True)
class Rule:
    """One of four: wait for a share of the workers, bound the lead, always take the same action, or bound how many run.

    bound: as that of SSP. A worker with a lead of `bound` still runs; the paper's s is one more.
    """

    share: float = 0.0
    bound: int = -1
    only: int = -1  # an action; of these rules, only turns in a ring make sense for longer than one update
    running: int = -1  # the number of workers that run at the same time

    def __str__(self) -> str:
        if self.only >= 0:
            return NAMES[self.only]
        if self.bound >= 0:
            return f"ssp({self.bound})"
        if self.running >= 0:
            return f"run({self.running})"
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
        if self.running >= 0:
            return longest_idle(self.running - (workers - idle))
        if self.bound < 0:
            return ALL if idle >= self.quorum(workers) else WAIT
        return WAIT if lead > self.bound else ALL if lead == 0 else ITSELF


#: Turns in the order of a ring: an extension, since the paper's actions cannot express turns.
RING = Rule(only=NEXT)
#: The twelve rules that consist of the paper's actions.
PAPERS_RULES = (*(Rule(each / 10) for each in (0, 2, 3, 4, 5, 6, 7, 8, 9, 10)), Rule(bound=2), Rule(bound=5))
#: The rules that the network chooses among, once a round.
RULES = (*PAPERS_RULES, *(Rule(running=each) for each in (2, 3, 4, 6)))
#: The actions that the paper's network chooses among, at every update.
ACTIONS = tuple(Rule(only=action) for action in (WAIT, ITSELF, ALL))


#: The names of rules as an option of the policy, which has no parentheses.
NETWORK: Literal["network"] = "network"
HeldRule: TypeAlias = Literal[
    "network",
    "asp",
    "20%",
    "30%",
    "40%",
    "50%",
    "60%",
    "70%",
    "80%",
    "90%",
    "bsp",
    "ssp-2",
    "ssp-5",
    "run-2",
    "run-3",
    "run-4",
    "run-6",
]


def option_name(rule: Rule) -> str:
    """Return the name of a rule as an option of the policy."""
    return str(rule).replace("(", "-").rstrip(")")


def named_rule(name: str) -> Rule:
    """Return the rule that has this name as an option of the policy."""
    return _BY_OPTION[name]


_BY_OPTION = {option_name(rule): rule for rule in RULES}


def last_a_round(rules: tuple[Rule, ...]) -> bool:
    """Return whether a choice among these rules lasts a round. A choice among single actions does not."""
    return any(rule.only < 0 for rule in rules)


def parse_rules(names: str) -> tuple[Rule, ...] | None:
    """Return the rules with these names, which commas separate, or None if a name is unknown."""
    known = {str(rule): rule for rule in (*RULES, *ACTIONS, RING)}
    found = [known.get(name) for name in names.split(",")]
    return None if None in found else tuple(rule for rule in found if rule)
