"""Bulk Synchronous Parallel: a barrier. All updates of a round are applied together, then all workers proceed.

`backup=c` (Chen et al., 2016) closes the barrier when all but c updates have arrived. `fraction=C` closes it when at
least a fraction C has arrived, as FL-R²SP does inside its groups: ⌈C·n⌉ of n members. Late updates are discarded, and
their workers are granted the newest model.

A round lasts from one Apply to the next. A worker that joins is granted into the open round at once: it starts level
with the slowest, so the barrier must wait for it.

With `pipeline=true` a round is settled earlier. When its last member is ready to push, a Stream names all of them, and
the shards apply and return their slices as they arrive. From then on no worker can enter the round, so a worker that
joins waits for the next one. A worker that leaves before its push is complete is missing from the Apply.
"""

from __future__ import annotations

from typing import Annotated

from paceline.policies.components import AnnouncedUpdate, Weigher, Weights, count_of
from paceline.policies.contract import Add, Apply, Decisions, Discard, Grant, Policy, Stream, Turn, Update, WorkerId
from paceline.policies.options import PolicyError, Range
from paceline.policies.tuning import BatchTuner


class BSP(Policy):
    summary = "a barrier: apply all updates together, then let all workers proceed"

    def __init__(
        self,
        backup: Annotated[int, Range(0), "the number of slowest workers not to wait for"] = 0,
        fraction: Annotated[
            float, Range(0, 1, open_low=True), "the fraction of the members to wait for, rounded up"
        ] = 1.0,
        pipeline: Annotated[bool, "return each slice as soon as all members have sent it"] = False,
        tune_batches: Annotated[bool, "give faster workers larger batches"] = False,
        max_growth: Annotated[float, Range(1), "the largest tuned batch, in units of the worker's own batch"] = 4.0,
        weights: Weights = "sum",
        running: Annotated[bool, "add updates up as they arrive, so that servers need not hold them"] = False,
    ) -> None:
        if pipeline and (backup or fraction < 1):
            raise PolicyError("bsp: pipeline=true needs every member's slices, so leave backup and fraction out.")
        if running and (pipeline or tune_batches):
            raise PolicyError("bsp: running=true is for plain rounds, so leave pipeline and tune_batches out.")
        self.backup, self.fraction, self.pipelined, self.running = backup, fraction, pipeline, running
        self.round = 0
        self.granted: dict[WorkerId, tuple[int, float]] = {}  # member → round and time of its Grant
        self.pending: list[Update] = []  # updates that have arrived in this round
        self.present: dict[WorkerId, None] = {}  # members whose updates are pending; they wait for the barrier
        self.weigher = Weigher(weights, tuned=tune_batches)
        self.tuner = BatchTuner(max_growth) if tune_batches else None
        # Pipelined:
        self.announced: dict[WorkerId, AnnouncedUpdate] = {}  # updates that are ready, until a Stream names them
        self.promised: dict[WorkerId, float] = {}  # the weights of this round's Stream
        self.joiners: dict[WorkerId, None] = {}  # workers that joined after the Stream; they enter the next round

    @property
    def least_workers(self) -> int:
        return self.backup + 1

    @property
    def hears_ready(self) -> bool:
        return self.pipelined

    def joined(self, worker: WorkerId, now: float) -> Decisions:
        if self.promised:
            self.joiners[worker] = None
            return []
        return [self._grant(worker, now)]

    def ready(self, worker: WorkerId, batch_size: int, now: float) -> Decisions:
        if not self.pipelined:
            return [Turn(worker)]
        if worker not in self.granted:
            return []
        self.weigher.see(worker, batch_size)
        self.announced[worker] = AnnouncedUpdate(worker, batch_size)
        return [Turn(worker), *self._stream()]

    def arrived(self, update: Update, now: float) -> Decisions:
        worker = update.worker
        if worker not in self.granted:
            return [Discard(update)]
        granted_round, granted_at = self.granted[worker]
        if not self.pipelined:
            self.weigher.see(worker, update.batch_size)
        if self.tuner:
            self.tuner.observe(update, now - granted_at)
        if granted_round < self.round:  # late: the barrier has closed without it
            return [Discard(update), self._grant(worker, now)]
        self.pending.append(update)
        self.present[worker] = None
        added: Decisions = [Add(update, self.round, self._sum_weight(update))] if self.running else []
        return added + self._close(now)

    def streams_together(self, workers: int) -> bool:
        return self.pipelined

    def measured(self, kind: str, subject: object, value: float, now: float) -> Decisions:
        if kind == "own_batch" and isinstance(subject, WorkerId):
            self.weigher.set_own(subject, int(value))
            if self.tuner:
                self.tuner.set_own(subject, int(value))
        return []

    def left(self, worker: WorkerId, now: float) -> Decisions:
        self.joiners.pop(worker, None)
        if self.granted.pop(worker, None) is None:
            return []
        self.present.pop(worker, None)
        self.announced.pop(worker, None)
        self.weigher.forget(worker)
        if self.tuner:
            self.tuner.forget(worker)
        decisions: Decisions = []
        if self.pipelined and not self.promised:  # the Stream can only name members, so this update cannot be in it
            decisions += [Discard(update) for update in self.pending if update.worker == worker]
            self.pending = [update for update in self.pending if update.worker != worker]
        return decisions + self._stream() + self._close(now)

    def _stream(self) -> Decisions:
        """Pipelined: settle the round if all its members are ready."""
        if not self.announced or len(self.announced) < len(self.granted):
            return []
        workers, weights = tuple(self.announced), self.weigher.together(list(self.announced.values()))
        self.promised = dict(zip(workers, weights, strict=True))
        self.announced = {}
        return [Stream(workers, weights)]

    def _close(self, now: float) -> Decisions:
        """End the round if enough updates have arrived."""
        if not (self.promised if self.pipelined else self.pending):
            return []
        if self.granted and len(self.granted) - len(self.present) > self._may_miss():
            return []
        applied = self._apply()
        self.round += 1
        proceeding = [*self.present, *self.joiners]
        self.present, self.joiners, self.promised, self.pending = {}, {}, {}, []
        return [*applied, *(self._grant(worker, now) for worker in proceeding)]

    def _apply(self) -> Decisions:
        """Return the round's Apply, or nothing if every worker of the Stream left before its push was complete."""
        if not self.pipelined:
            weights = self.weigher.together(self.pending)
            sums = ((self.round, weights[0] / self._sum_weight(self.pending[0])),) if self.running else ()
            return [Apply(tuple(self.pending), weights, sums=sums)]
        by_worker = {update.worker: update for update in self.pending}
        updates = tuple(by_worker[worker] for worker in self.promised if worker in by_worker)
        return [Apply(updates, tuple(self.promised[update.worker] for update in updates))] if updates else []

    def _sum_weight(self, update: Update) -> float:
        """Return an update's weight in a running sum: the part that is known before the round is over."""
        return float(update.batch_size) if self.weigher.kind == "mean" else 1.0

    def _may_miss(self) -> int:
        """Return the number of members whose updates the barrier does not need."""
        members = len(self.granted)
        quorum = members - self.backup
        if self.fraction < 1:
            quorum = min(quorum, count_of(self.fraction, members))
        return members - max(1, quorum)

    def _grant(self, worker: WorkerId, now: float) -> Grant:
        self.granted[worker] = (self.round, now)
        return Grant(worker, self.tuner.batch(worker) if self.tuner else None)
