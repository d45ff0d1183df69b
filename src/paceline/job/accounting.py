"""The ledger between a driver and a policy. It defines staleness and progress gap for every driver and report.

The *staleness* of an update is the number of model versions applied between the pull that it was computed from and its
own application. The *progress gap* is taken at a Grant: the completed iterations of the granted worker minus those of
the slowest member. A joiner starts at the slowest member's progress, at its first Grant. Until then it is not counted,
so that it does not widen the gap of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from paceline.policies import Apply, Cancel, Decision, Discard, Grant, Keep, Policy, Turn, Update, WorkerId
from paceline.policies.components import Progress


class Watcher(Protocol):
    """Receives every trace event of a job as it happens. `paceline.observe.Observer` is a Watcher."""

    def awaited(self, time: float, joined: int, missing: int) -> None: ...
    def described(self, time: float, elements: int, optimizer: str) -> None: ...
    def joined(self, time: float, worker: int, incarnation: int = 1) -> None: ...
    def granted(self, time: float, worker: int, batch_size: int | None, progress_gap: int) -> None: ...
    def pulled(self, time: float, worker: int, version: int) -> None: ...
    def computed(self, time: float, worker: int, seconds: float | None = None) -> None: ...
    def turned(self, time: float, worker: int) -> None: ...
    def arrived(
        self,
        time: float,
        worker: int,
        iteration: int,
        batch_size: int,
        loss: float | None = None,
        incarnation: int = 1,
    ) -> None: ...
    def applied(
        self,
        time: float,
        version: int,
        workers: tuple[int, ...],
        iterations: tuple[int, ...],
        staleness: tuple[int, ...],
        incarnations: tuple[int, ...] = (),
    ) -> None: ...
    def kept(self, time: float, worker: int, iteration: int, slot: int, incarnation: int = 1) -> None: ...
    def discarded(self, time: float, worker: int, iteration: int, incarnation: int = 1) -> None: ...
    def clipped(self, time: float, worker: int, iteration: int, factor: float, incarnation: int = 1) -> None: ...
    def cancelled(self, time: float, worker: int) -> None: ...
    def left(self, time: float, worker: int, lost: bool = False) -> None: ...
    def progressed(self, time: float, epoch: int, done: int, total: int) -> None: ...
    def saved(self, time: float, version: int, seconds: float | None = None) -> None: ...
    def measured(self, time: float, worker: int, kind: str, value: float) -> None: ...


class Ledger:
    """Passes events on to the policy and reports them to the watcher.

    The driver reports each decision (`note`) when it carries the decision out, so that versions count in that order.
    """

    def __init__(self, policy: Policy, watcher: Watcher) -> None:
        self.policy = policy
        self.version = 0  # of the model: the number of Applies so far
        self.progress = Progress()
        self._new: set[WorkerId] = set()  # members that have had no Grant yet
        self.watcher = watcher
        self.pushes_freely = not policy.hears_ready

    def joined(self, worker: WorkerId, now: float, incarnation: int = 1) -> list[Decision]:
        """Report that a worker joined, and return the policy's decisions."""
        self._new.add(worker)
        self.watcher.joined(now, worker, incarnation)
        return self.policy.joined(worker, now)

    def ready(self, worker: WorkerId, batch_size: int, now: float, seconds: float | None = None) -> list[Decision]:
        """Report that a worker has computed a gradient, and return the policy's decisions.

        seconds: how long the worker computed, if the driver did not see it begin.
        """
        self.watcher.computed(now, worker, seconds)
        return self.policy.ready(worker, batch_size, now)

    def turned(self, worker: WorkerId, now: float, seconds: float | None = None) -> None:
        """Report that a worker has computed a gradient and may push it. For use with `pushes_freely`.

        The policy is not told, because it would answer with a Turn and nothing else.
        """
        self.watcher.computed(now, worker, seconds)
        self.watcher.turned(now, worker)

    def arrived(self, update: Update, now: float) -> list[Decision]:
        """Report that a whole update has arrived, and return the policy's decisions."""
        worker = update.worker
        if worker in self.progress:
            self.progress.advance(worker)
        self.watcher.arrived(now, worker, update.iteration, update.batch_size, update.loss, update.incarnation)
        return self.policy.arrived(update, now)

    def measured(self, kind: str, subject: object, value: float, now: float) -> list[Decision]:
        """Report a measured value of a worker or an update, and return the policy's decisions."""
        worker = subject.worker if isinstance(subject, Update) else subject
        if isinstance(worker, int):
            self.watcher.measured(now, worker, kind, value)
        return self.policy.measured(kind, subject, value, now)

    def own_batch(self, worker: WorkerId, batch_size: int, now: float) -> list[Decision]:
        """Tell the policy the batch size that a worker computes if a Grant names none, and return its decisions."""
        return self.policy.measured("own_batch", worker, float(batch_size), now)

    def held(self, worker: WorkerId, now: float) -> list[Decision]:
        """Tell the policy that the servers hold all of a worker's streamed update, and return its decisions."""
        return self.policy.measured("held", worker, 1.0, now)

    def left(self, worker: WorkerId, now: float, lost: bool = False) -> list[Decision]:
        """Report that a worker left or was lost, and return the policy's decisions."""
        if worker in self._new:
            self._new.discard(worker)
        else:
            self.progress.remove(worker)
        self.watcher.left(now, worker, lost)
        return self.policy.left(worker, now)

    def woke(self, now: float) -> list[Decision]:
        """Tell the policy that its WakeAt is due, and return its decisions."""
        return self.policy.woke(now)

    def gap(self, worker: WorkerId) -> int:
        """Return the progress gap of a worker that has had a Grant."""
        return self.progress.gap(worker)

    # Decisions that the driver carries out

    def note(self, decision: Decision, now: float) -> None:
        """Report a decision of any kind that is carried out now. Some kinds leave no trace."""
        reporter = REPORTERS.get(type(decision))
        if reporter is not None:
            reporter(self, decision, now)

    def note_granted(self, grant: Grant, now: float) -> None:
        """Report a Grant with its progress gap. A joiner begins to count at its first Grant."""
        if self._new and grant.worker in self._new:
            self._new.discard(grant.worker)
            self.progress.add(grant.worker)
        self.watcher.granted(now, grant.worker, grant.batch_size, self.progress.gap(grant.worker))

    def note_applied(self, apply: Apply, now: float) -> None:
        """Count a new version of the model, and report the staleness of its updates."""
        updates, before = apply.updates, self.version
        self.version = version = before + 1
        if len(updates) == 1:  # the common case, made fast
            update = updates[0]
            stale = before - update.base_version
            incarnations: tuple[int, ...] = (update.incarnation,)
            self.watcher.applied(now, version, (update.worker,), (update.iteration,), (stale,), incarnations)
        else:
            workers = tuple([update.worker for update in updates])
            iterations = tuple([update.iteration for update in updates])
            staleness = tuple([before - update.base_version for update in updates])
            incarnations = tuple([update.incarnation for update in updates])
            self.watcher.applied(now, version, workers, iterations, staleness, incarnations)

    def note_turn(self, turn: Turn, now: float) -> None:
        """Report a Turn."""
        self.watcher.turned(now, turn.worker)

    def note_discarded(self, discard: Discard, now: float) -> None:
        """Report a Discard."""
        update = discard.update
        self.watcher.discarded(now, update.worker, update.iteration, update.incarnation)

    def note_kept(self, keep: Keep, now: float) -> None:
        """Report a Keep."""
        update = keep.update
        self.watcher.kept(now, update.worker, update.iteration, keep.slot, update.incarnation)

    def note_cancelled(self, cancel: Cancel, now: float) -> None:
        """Report a Cancel."""
        self.watcher.cancelled(now, cancel.worker)


#: The method that reports each kind of decision. Other kinds leave no trace.
REPORTERS: dict[type, Callable[[Ledger, Any, float], None]] = {
    Grant: Ledger.note_granted,
    Apply: Ledger.note_applied,
    Turn: Ledger.note_turn,
    Discard: Ledger.note_discarded,
    Keep: Ledger.note_kept,
    Cancel: Ledger.note_cancelled,
}
