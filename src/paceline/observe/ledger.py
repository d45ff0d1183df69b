"""A policy with its books kept. Staleness and progress gap are defined here, once, for every driver and report.

*Staleness* of an update: model versions applied between the pull it was computed from and its own application.
*Progress gap*: taken at a Grant, the granted worker's completed iterations minus the slowest member's; a joiner starts
at the slowest member's progress.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from paceline.observe.events import (
    Applied,
    Arrived,
    Cancelled,
    Computed,
    Discarded,
    Event,
    Granted,
    Joined,
    Kept,
    Left,
    Turned,
)
from paceline.policies import Apply, Cancel, Decision, Discard, Grant, Keep, Policy, Turn, Update, WorkerId
from paceline.policies.pieces import Progress

Sink: TypeAlias = Callable[[Event], None]


class Ledger:
    """Stands between a driver and a policy: passes events in and decisions out, and writes both down."""

    def __init__(self, policy: Policy, sink: Sink) -> None:
        self.policy = policy
        self.version = 0  # of the model: how many Applies there were
        self.progress = Progress()
        self._sink = sink
        self._always_turn = type(policy).ready is Policy.ready

    def joined(self, worker: WorkerId, now: float) -> list[Decision]:
        self.progress.add(worker)
        self._sink(Joined(now, worker))
        return self._note(self.policy.joined(worker, now), now)

    def ready(self, worker: WorkerId, now: float) -> list[Decision]:
        self._sink(Computed(now, worker))
        if self._always_turn:  # as most policies do; it need not be asked
            self._sink(Turned(now, worker))
            return [Turn(worker)]
        return self._note(self.policy.ready(worker, now), now)

    def arrived(self, update: Update, now: float) -> list[Decision]:
        if update.worker in self.progress:
            self.progress.advance(update.worker)
        self._sink(Arrived(now, update.worker, update.iteration, update.batch_size))
        return self._note(self.policy.arrived(update, now), now)

    def measured(self, kind: str, subject: object, value: float, now: float) -> list[Decision]:
        return self._note(self.policy.measured(kind, subject, value, now), now)

    def left(self, worker: WorkerId, now: float) -> list[Decision]:
        self.progress.remove(worker)
        self._sink(Left(now, worker))
        return self._note(self.policy.left(worker, now), now)

    def woke(self, now: float) -> list[Decision]:
        return self._note(self.policy.woke(now), now)

    def _note(self, decisions: list[Decision], now: float) -> list[Decision]:
        sink = self._sink
        for decision in decisions:
            kind = type(decision)
            if kind is Grant:
                worker = decision.worker  # type: ignore[union-attr]
                ahead = self.progress[worker] - self.progress.slowest
                sink(Granted(now, worker, decision.batch_size, ahead))  # type: ignore[union-attr]
            elif kind is Turn:
                sink(Turned(now, decision.worker))  # type: ignore[union-attr]
            elif kind is Apply:
                updates: tuple[Update, ...] = decision.updates  # type: ignore[union-attr]
                before = self.version
                self.version = before + 1
                if len(updates) == 1:  # the common case, made quick
                    (update,) = updates
                    stale = before - update.base_version
                    sink(Applied(now, self.version, (update.worker,), (update.iteration,), (stale,)))
                else:
                    sink(
                        Applied(
                            now,
                            self.version,
                            tuple([update.worker for update in updates]),
                            tuple([update.iteration for update in updates]),
                            tuple([before - update.base_version for update in updates]),
                        )
                    )
            elif isinstance(decision, Discard):
                sink(Discarded(now, decision.update.worker, decision.update.iteration))
            elif isinstance(decision, Keep):
                sink(Kept(now, decision.update.worker, decision.update.iteration, decision.slot))
            elif isinstance(decision, Cancel):
                sink(Cancelled(now, decision.worker))
        return decisions
