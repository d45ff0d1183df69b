"""A journal of a policy: every call with its time and its decisions, so that the decisions of a run can be repeated.

Each entry is one line of JSON, `{"told": "arrived", "now": 1.5, "of": […], "decided": [["Apply", …], …]}`: the method
that was called, the time, the arguments and the decisions. The first line names the policy. Times are exact and timers
are included, so a fresh policy that receives the same calls must make the same decisions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from paceline.policies import Policy, Update, make

RECORDED_METHODS = ("joined", "ready", "arrived", "measured", "left", "woke")


class Journal:
    """A proxy of a policy that writes every call and its decisions. All other attributes are those of the policy."""

    hears_ready = True  # the policy is called for every event, so that every event is in the journal

    def __init__(self, policy: Policy, name: str, write: Callable[[str], None]) -> None:
        self._policy, self._write = policy, write
        write(json.dumps({"policy": name, "streamed": policy.streamed}))

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._policy, name)
        if name not in RECORDED_METHODS:
            return attribute

        def recorded(*arguments: Any) -> Any:
            *of, now = arguments
            decisions = attribute(*of, now)
            self._write(json.dumps({"told": name, "now": now, "of": _plain(of), "decided": _plain(decisions)}))
            return decisions

        return recorded


class JournalEntry(NamedTuple):
    """One call of a policy and its decisions, in plain values."""

    told: str  # the method that was called
    now: float
    of: list[Any]  # the other arguments
    decided: list[Any]


class Difference(NamedTuple):
    """The first entry for which a policy decides differently now."""

    line: int
    entry: JournalEntry
    decided: list[Any]  # the decisions that it makes now


def read(lines: Iterable[str]) -> tuple[Policy, Iterator[JournalEntry]]:
    """Return a fresh policy as it was at the beginning of the journal, and the entries."""
    rows = iter(lines)
    head = json.loads(next(rows))
    policy = make(head["policy"])
    policy.streamed = head["streamed"]
    return policy, (JournalEntry(**json.loads(row)) for row in rows)


def tell(policy: Any, entry: JournalEntry) -> list[Any]:
    """Repeat the call of this entry on a policy or a ledger, and return its decisions."""
    of = entry.of
    if entry.told == "arrived":
        of = [Update(*of[0])]
    elif entry.told == "measured" and isinstance(of[1], list):
        of = [of[0], tuple(of[1]) if of[0] == "pardon" else Update(*of[1]), of[2]]
    decisions: list[Any] = getattr(policy, entry.told)(*of, entry.now)
    return decisions


def in_plain_values(decisions: list[Any]) -> list[Any]:
    """Return decisions as the journal writes them. They pass through JSON, which turns tuples into lists."""
    written: list[Any] = json.loads(json.dumps(_plain(decisions)))
    return written


def _plain(value: Any) -> Any:
    """Convert a value for JSON. A decision becomes its name and its fields, an update its fields."""
    if isinstance(value, Update):
        row = [getattr(value, each.name) for each in fields(value)]
        return row[:-1] if value.incarnation == 1 else row  # the format of journals that predate incarnations
    if is_dataclass(value):
        return [type(value).__name__, *(_plain(getattr(value, each.name)) for each in fields(value))]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
