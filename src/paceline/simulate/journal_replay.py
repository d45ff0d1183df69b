"""A real run's journal, told again in virtual time: the simulator's clock and ledger, and a fresh policy.

The policy is a pure state machine, so what it decides here is what it decided there. A difference is a bug: a policy
that looks at more than it is told, or a driver that tells it something else.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.job import Ledger
from paceline.observe.journal import Difference, JournalEntry, in_plain_values, read, tell
from paceline.observe.observer import Observer
from paceline.simulate.clock import Clock


def retell(lines: Iterable[str], observer: Observer | None = None) -> tuple[int, Difference | None]:
    """How many decisions were made again, and the first that came out otherwise."""
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
