"""RLP (Zhu et al., ICLR 2020): a learned network decides who goes on.

Whenever an update comes in, the server keeps idle workers idle, lets the one go on whose update it was, or lets all
idle ones go on. Which of these, a rule says; and which rule, for the next round, the network: it sees how training has
gone so far and how unequal the workers are (`features.py`, `rules.py`). Updates that come while nobody is let go are
applied together as soon as somebody is, so that the rule that waits for all is BSP and the one that never waits is ASP.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from paceline.policies import Apply, Discard, Grant, Policy, Update, WorkerId
from paceline.policies.components import Progress, Weigher, Weights
from paceline.policies.contract import Decisions
from paceline.rlp.cluster_state import ClusterState
from paceline.rlp.features import ALL, ITSELF, NEXT, PATIENCE, is_due
from paceline.rlp.network_file import SHIPPED, load


class RLP(Policy):
    hears_loss = True
    summary = "a learned network chooses, once a round, how many are waited for"

    def __init__(
        self,
        network: Annotated[str, "a file that `paceline rlp learn` wrote; or `shipped`, which comes along"] = SHIPPED,
        weights: Weights = "sum",
    ) -> None:
        state = load(network).state
        self.network = network
        self.weigher = Weigher(weights)
        self.progress = Progress()
        self.running: dict[WorkerId, int] = {}  # who runs → updates when it was let go
        self.idle: dict[WorkerId, int] = {}  # who waits → since which update; who has waited longest is the first
        self.pending: list[Update] = []  # come in since anybody was let go
        self.sight = ClusterState(state.history)
        self.rule = 0  # the newest choice, by its number
        self.chosen_at = 0  # updates when it was made
        self.ring: dict[WorkerId, None] = {}  # members, the one whose turn it is first
        self.validation: float | None = None  # the newest loss that was measured on validation data

    def joined(self, worker: WorkerId, now: float) -> Decisions:
        self.progress.add(worker)
        self.ring[worker] = None
        return self._go([worker])

    def arrived(self, update: Update, now: float) -> Decisions:
        worker = update.worker
        if worker not in self.running:
            return [Discard(update)]
        self.weigher.see(worker, update.batch_size)
        self.pending.append(update)
        members = len(self.progress)
        done = self.progress.advance(worker)
        stale = self.sight.updates - self.running.pop(worker)
        action = self._decide(update, members, stale, done - self.progress.slowest)
        return self._go(self._let_go(worker, members, action))

    def measured(self, kind: str, subject: object, value: float, now: float) -> Decisions:
        if kind == "validation loss":
            self.validation = value
        elif kind == "momentum":
            self.sight.momentum = value
        return []

    def left(self, worker: WorkerId, now: float) -> Decisions:
        if worker not in self.progress:
            return []
        self.progress.remove(worker)
        self.running.pop(worker, None)
        self.idle.pop(worker, None)
        self.ring.pop(worker)
        self.weigher.forget(worker)
        self.sight.forget(worker)
        if self.running or not (self.idle or self.pending):
            return []
        return self._go(list(self.idle))  # nobody is left who could come in

    def _decide(self, update: Update, members: int, stale: int, lead: int) -> int:
        """The action that the rule takes; the rule is chosen anew once a round."""
        network, sight = load(self.network), self.sight
        loss = update.loss
        if network.state.validated and self.validation is not None:
            loss = self.validation
        sight.see(update.worker, members, stale, update.compute_seconds, loss, network.state)
        self.idle[update.worker] = sight.updates
        if is_due(sight.updates, members, network.lasts) or sight.updates >= self.chosen_at + members:
            seen = np.array(sight.state(members, network.state), np.float32)
            self.rule = int(network.values(seen).argmax())
            self.chosen_at = sight.updates
        return network.rules[self.rule].action(members, len(self.idle), lead)

    def _let_go(self, came: WorkerId, members: int, action: int) -> list[WorkerId]:
        """Whom an action lets go. Whatever it is, nobody waits for ever and somebody always runs."""
        if action == ALL:
            return list(self.idle)
        chosen: dict[WorkerId, None] = {}
        for worker, since in self.idle.items():
            if self.sight.updates - since < PATIENCE * members:
                break
            chosen[worker] = None
        if action == ITSELF:
            chosen[came] = None
        elif action == NEXT and self.ring and next(iter(self.ring)) in self.idle:
            first = next(iter(self.ring))
            chosen[first] = None
            self.ring[first] = self.ring.pop(first)  # it is the last now
        return list(chosen if chosen or self.running else self.idle)

    def _go(self, workers: list[WorkerId]) -> Decisions:
        decisions: Decisions = []
        if self.pending and (workers or not self.progress):
            apply = Apply(tuple(self.pending), self.weigher.in_round(self.pending, len(self.progress)))
            self.pending = []
            decisions.append(apply)
        for worker in workers:
            self.idle.pop(worker, None)
            self.running[worker] = self.sight.updates
            decisions.append(Grant(worker))
        return decisions
