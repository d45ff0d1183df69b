"""A journal: everything a policy was told, when, and what it decided, so that a run's decisions can be made again.

Each entry is one line of JSON, `{"told": "arrived", "now": 1.5, "of": […], "decided": [["Apply", …], …]}`; the first
line names the policy. Times are written exactly, wakes are in it, and so any driver that retells it to a fresh policy
must get the same decisions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from paceline.policies import Policy, Update, make

TOLD = ("joined", "ready", "arrived", "measured", "left", "woke")


class Journal:
    """Stands before a policy, and writes down what goes in and what comes out. In all else it is the policy."""

    hears_ready = True  # all that is told is written down, so that nothing is taken for granted

    def __init__(self, policy: Policy, name: str, write: Callable[[str], None]) -> None:
        self._policy, self._write = policy, write
        write(json.dumps({"policy": name, "streamed": policy.streamed}))

    def __getattr__(self, name: str) -> Any:
        asked = getattr(self._policy, name)
        if name not in TOLD:
            return asked

        def told(*arguments: Any) -> Any:
            *of, now = arguments
            decisions = asked(*of, now)
            self._write(json.dumps({"told": name, "now": now, "of": _plain(of), "decided": _plain(decisions)}))
            return decisions

        return told


class JournalEntry(NamedTuple):
    """One thing that a policy was told, and what it decided then, in plain values."""

    told: str
    now: float
    of: list[Any]
    decided: list[Any]


class Difference(NamedTuple):
    """The first decision that came out otherwise."""

    line: int
    entry: JournalEntry
    decided: list[Any]


def read(lines: Iterable[str]) -> tuple[Policy, Iterator[JournalEntry]]:
    """A fresh policy as the journal's was at first, and the entries."""
    rows = iter(lines)
    head = json.loads(next(rows))
    policy = make(head["policy"])
    policy.streamed = head["streamed"]
    return policy, (JournalEntry(**json.loads(row)) for row in rows)


def tell(teller: Any, entry: JournalEntry) -> list[Any]:
    """Tell a policy, or a ledger, what the entry says; its decisions."""
    of = entry.of
    if entry.told == "arrived":
        of = [Update(*of[0])]
    elif entry.told == "measured" and isinstance(of[1], list):
        of = [of[0], tuple(of[1]) if of[0] == "pardon" else Update(*of[1]), of[2]]
    decisions: list[Any] = getattr(teller, entry.told)(*of, entry.now)
    return decisions


def in_plain_values(decisions: list[Any]) -> list[Any]:
    """Decisions as the journal writes them. They go through JSON and back, since a tuple is a list there."""
    written: list[Any] = json.loads(json.dumps(_plain(decisions)))
    return written


def _plain(value: Any) -> Any:
    """As values that JSON knows: a decision is its name and its fields, an update is its fields."""
    if isinstance(value, Update):
        row = [getattr(value, each.name) for each in fields(value)]
        return row[:-1] if value.incarnation == 1 else row  # as in a journal from before there were incarnations
    if is_dataclass(value):
        return [type(value).__name__, *(_plain(getattr(value, each.name)) for each in fields(value))]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
