"""The journal of a real run, replayed in virtual time with the simulator's clock, a ledger and a fresh policy.

A policy is a pure state machine, so it must make the same decisions again. A difference is a bug: either the policy
depends on more than its inputs, or the driver gave it other inputs than it recorded.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.job import Ledger
from paceline.observe.journal import Difference, JournalEntry, in_plain_values, read, tell
from paceline.observe.observer import Observer
from paceline.simulate.clock import Clock


def replay_journal(lines: Iterable[str], observer: Observer | None = None) -> tuple[int, Difference | None]:
    """Return the number of decisions that were made again, and the first difference, if there is one."""
    policy, entries = read(lines)
    ledger, clock = Ledger(policy, observer or Observer()), Clock()
    count = 0
    found: Difference | None = None

    def happen(numbered: tuple[int, JournalEntry]) -> None:
        nonlocal count, found
        line, entry = numbered
        decisions = tell(ledger, entry)
        for decision in decisions:
            ledger.note(decision, entry.now)
        decided = in_plain_values(decisions)
        count += len(decided)
        if decided != entry.decided:
            found = Difference(line, entry, decided)
            clock.running = False

    for line, entry in enumerate(entries, start=2):
        clock.at(entry.now, happen, (line, entry))
    while clock.run(most=10_000):
        pass
    return count, found
