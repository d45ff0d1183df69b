"""RLP (Zhu et al., ICLR 2020): a learned network decides which workers run.

Whenever an update arrives, the server takes one of the paper's three actions: it keeps all idle workers idle, grants
the worker whose update arrived, or grants all idle workers. A rule says which action (`rules.py`). The network chooses
the rule for the next round from the state: the course of training so far, and the inequality of the workers
(`features.py`). Updates that arrive while no worker is granted are applied together with the next Grant. So the rule
that waits for all workers is BSP, and the one that never waits is ASP.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated

import numpy as np

from paceline.policies import Apply, Discard, Grant, Policy, Update, WorkerId
from paceline.policies.components import Progress, Weigher, Weights
from paceline.policies.contract import Decisions
from paceline.rlp.cluster_state import ClusterState
from paceline.rlp.features import ALL, CHOICE_WEIGHT, ITSELF, NEXT, PATIENCE, is_due
from paceline.rlp.network_file import SHIPPED, load
from paceline.rlp.rules import NETWORK, HeldRule, named_rule


class RLP(Policy):
    hears_loss = True
    queues_transfers = True  # sharing a link, workers that are granted together would all wait for the last of them
    summary = "a learned network chooses once a round how many workers to wait for"

    def __init__(
        self,
        network: Annotated[str, "a file from `paceline policies learn`, or `shipped`"] = SHIPPED,
        weights: Weights = "sum",
        rule: Annotated[HeldRule, "a rule to hold from beginning to end, in place of the network's choices"] = NETWORK,
    ) -> None:
        state = load(network).state
        self.network, self.rule = network, rule
        self.weigher = Weigher(weights)
        self.progress = Progress()
        self.running: dict[WorkerId, int] = {}  # active worker → number of updates when it was granted
        self.granted_at: dict[WorkerId, float] = {}  # active worker → when it was granted
        self.idle: dict[WorkerId, int] = {}  # idle worker → update since which it is idle, the longest first
        self.pending: list[Update] = []  # updates since the last Grant
        self.cluster_state = ClusterState(state.history)
        self.choice = 0  # number of the rule that was chosen last
        self.values: list[float] = []  # Q of each rule, as a mean over recent rounds
        self.choices = 0
        self.chosen_at = 0  # number of updates when it was chosen
        self.ring: dict[WorkerId, None] = {}  # members in the order of their turns, the next one first
        self.validation: float | None = None  # the newest loss on validation data

    def joined(self, worker: WorkerId, now: float) -> Decisions:
        self.progress.add(worker)
        self.ring[worker] = None
        return self._grant([worker], now)

    def arrived(self, update: Update, now: float) -> Decisions:
        worker = update.worker
        if worker not in self.running:
            return [Discard(update)]
        self.weigher.see(worker, update.batch_size)
        self.pending.append(update)
        members = len(self.progress)
        done = self.progress.advance(worker)
        action = self._decide(update, members, done - self.progress.slowest, now)
        return self._grant(self._select(worker, members, action), now)

    def measured(self, kind: str, subject: object, value: float, now: float) -> Decisions:
        if kind in ("val_loss", "validation loss"):
            self.validation = value
        elif kind == "momentum":
            self.cluster_state.momentum = value
        return []

    def left(self, worker: WorkerId, now: float) -> Decisions:
        if worker not in self.progress:
            return []
        self.progress.remove(worker)
        self.running.pop(worker, None)
        self.granted_at.pop(worker, None)
        self.idle.pop(worker, None)
        self.ring.pop(worker)
        self.weigher.forget(worker)
        self.cluster_state.forget(worker)
        if self.running or not (self.idle or self.pending):
            return []
        return self._grant(list(self.idle), now)  # no running worker is left whose update could arrive

    def _decide(self, update: Update, members: int, lead: int, now: float) -> int:
        """Record an update and return the action of the rule. Once a round, choose a rule first."""
        network, cluster_state, worker = load(self.network), self.cluster_state, update.worker
        running, granted_at = len(self.running), self.granted_at.pop(worker)
        staleness = cluster_state.updates - self.running.pop(worker)
        loss = update.loss
        if network.state.validated and self.validation is not None:
            loss = self.validation
        seconds = update.compute_seconds
        cluster_state.observe(worker, members, staleness, seconds, loss, network.state, granted_at, now, running)
        self.idle[worker] = cluster_state.updates
        if self.rule != NETWORK:
            return named_rule(self.rule).action(members, len(self.idle), lead)
        if is_due(cluster_state.updates, members, network.lasts) or cluster_state.updates >= self.chosen_at + members:
            state = np.array(cluster_state.vector(members, network.state), np.float32)
            self.choices += 1
            weight = max(CHOICE_WEIGHT, 1 / self.choices) if network.averages else 1.0
            old = self.values or [0.0] * len(network.rules)
            newest = network.values(state).tolist()
            self.values = [mean + weight * (new - mean) for mean, new in zip(old, newest, strict=True)]
            self.choice = self.values.index(max(self.values))
            self.chosen_at = cluster_state.updates
        return network.rules[self.choice].action(members, len(self.idle), lead)

    def _select(self, arrived: WorkerId, members: int, action: int) -> list[WorkerId]:
        """Return the workers that an action grants. Whatever the action, no worker waits forever and one always runs.

        arrived: the worker whose update arrived.
        """
        if action == ALL:
            return list(self.idle)
        chosen: dict[WorkerId, None] = {}
        for worker, since in self.idle.items():
            if self.cluster_state.updates - since < PATIENCE * members:
                break
            chosen[worker] = None
        if action == ITSELF:
            chosen[arrived] = None
        elif action > NEXT:
            chosen |= dict.fromkeys(islice(self.idle, action - NEXT))
        elif action == NEXT and self.ring and next(iter(self.ring)) in self.idle:
            first = next(iter(self.ring))
            chosen[first] = None
            self.ring[first] = self.ring.pop(first)  # move it to the end
        return list(chosen if chosen or self.running else self.idle)

    def _grant(self, workers: list[WorkerId], now: float) -> Decisions:
        """Apply the pending updates and grant these workers."""
        decisions: Decisions = []
        if self.pending and (workers or not self.progress):
            apply = Apply(tuple(self.pending), self.weigher.in_round(self.pending, len(self.progress)))
            self.pending = []
            decisions.append(apply)
        for worker in workers:
            self.idle.pop(worker, None)
            self.running[worker] = self.cluster_state.updates
            self.granted_at[worker] = now
            decisions.append(Grant(worker))
        return decisions
