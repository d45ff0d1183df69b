"""A policy with its books kept. Staleness and progress gap are defined here, once, for every driver and report.

*Staleness* of an update: model versions applied between the pull it was computed from and its own application.
*Progress gap*: taken at a Grant, the granted worker's completed iterations minus the slowest member's; a joiner starts
at the slowest member's progress, with its first Grant. Until then it holds nobody back and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.observe.observer import Observer
from paceline.policies import Apply, Cancel, Decision, Discard, Grant, Keep, Policy, Turn, Update, WorkerId
from paceline.policies.pieces import Progress


class Ledger:
    """Stands between a driver and a policy: passes events in and decisions out, and writes both down."""

    def __init__(self, policy: Policy, observer: Observer) -> None:
        self.policy = policy
        self.version = 0  # of the model: how many Applies there were
        self.progress = Progress()
        self._new: set[WorkerId] = set()  # members without a Grant so far
        self._observer = observer
        self._write: dict[type, Callable[[Any, float], None]] = {
            Grant: self._granted,
            Apply: self._applied,
            Turn: self._turn,
            Discard: self._discarded,
            Keep: self._kept,
            Cancel: self._cancelled,
        }
        self.pushes_freely = not policy.hears_ready

    def joined(self, worker: WorkerId, now: float, incarnation: int = 1) -> list[Decision]:
        self._new.add(worker)
        self._observer.joined(now, worker, incarnation)
        return self._note(self.policy.joined(worker, now), now)

    def ready(self, worker: WorkerId, batch_size: int, now: float, seconds: float | None = None) -> list[Decision]:
        """`seconds`: how long the worker has computed, where the driver did not see it begin."""
        self._observer.computed(now, worker, seconds)
        return self._note(self.policy.ready(worker, batch_size, now), now)

    def turned(self, worker: WorkerId, now: float) -> None:
        """What `ready` comes to where the policy does not hear it (`pushes_freely`), without asking it."""
        self._observer.computed(now, worker)
        self._observer.turned(now, worker)

    def arrived(self, update: Update, now: float) -> list[Decision]:
        if update.worker in self.progress:
            self.progress.advance(update.worker)
        self._observer.arrived(now, update.worker, update.iteration, update.batch_size, update.loss, update.incarnation)
        return self._note(self.policy.arrived(update, now), now)

    def measured(self, kind: str, subject: object, value: float, now: float) -> list[Decision]:
        worker = subject.worker if isinstance(subject, Update) else subject
        if isinstance(worker, int):
            self._observer.measured(now, worker, kind, value)
        return self._note(self.policy.measured(kind, subject, value, now), now)

    def left(self, worker: WorkerId, now: float, lost: bool = False) -> list[Decision]:
        if worker in self._new:
            self._new.discard(worker)
        else:
            self.progress.remove(worker)
        self._observer.left(now, worker, lost)
        return self._note(self.policy.left(worker, now), now)

    def woke(self, now: float) -> list[Decision]:
        return self._note(self.policy.woke(now), now)

    def _note(self, decisions: list[Decision], now: float) -> list[Decision]:
        for decision in decisions:
            write = self._write.get(type(decision))
            if write is not None:
                write(decision, now)
        return decisions

    def _granted(self, grant: Grant, now: float) -> None:
        if self._new and grant.worker in self._new:
            self._new.discard(grant.worker)
            self.progress.add(grant.worker)
        ahead = self.progress[grant.worker] - self.progress.slowest
        self._observer.granted(now, grant.worker, grant.batch_size, ahead)

    def _applied(self, apply: Apply, now: float) -> None:
        updates, before = apply.updates, self.version
        self.version = version = before + 1
        if len(updates) == 1:  # the common case, made quick
            update = updates[0]
            stale = before - update.base_version
            self._observer.applied(now, version, (update.worker,), (update.iteration,), (stale,), (update.incarnation,))
        else:
            workers = tuple([update.worker for update in updates])
            iterations = tuple([update.iteration for update in updates])
            staleness = tuple([before - update.base_version for update in updates])
            incarnations = tuple([update.incarnation for update in updates])
            self._observer.applied(now, version, workers, iterations, staleness, incarnations)

    def _turn(self, turn: Turn, now: float) -> None:
        self._observer.turned(now, turn.worker)

    def _discarded(self, discard: Discard, now: float) -> None:
        update = discard.update
        self._observer.discarded(now, update.worker, update.iteration, update.incarnation)

    def _kept(self, keep: Keep, now: float) -> None:
        update = keep.update
        self._observer.kept(now, update.worker, update.iteration, keep.slot, update.incarnation)

    def _cancelled(self, cancel: Cancel, now: float) -> None:
        self._observer.cancelled(now, cancel.worker)
