"""The first layer of a JobState: the state that all layers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.job.accounting import Ledger, Watcher
from paceline.job.clipping import Clipping
from paceline.job.config import JobConfig
from paceline.job.instructions import Instruction
from paceline.job.leases import Leases
from paceline.job.membership import Roster
from paceline.job.samples import Samples
from paceline.policies import Policy, is_same_policy


class CoreLayer:
    """Members, leases, samples, versions, and the instructions that answer the current event."""

    def __init__(self, policy: Policy, config: JobConfig, watcher: Watcher, restored: bool, now: float) -> None:
        self.config = config
        self.ledger = Ledger(policy, watcher)
        self.roster = Roster(config.workers, config.awaited, restored)
        self.leases = Leases(config.lease, config.absence)
        self.samples: Samples | None = None
        self.clipping = Clipping(config.max_norm) if config.max_norm is not None else None
        self.incarnations: dict[int, int] = dict(config.incarnations)  # worker → its last incarnation
        self._shards_with_weights: set[int] = set()  # shards that have their first weights
        # (worker, incarnation) → the newest iteration that was applied. A Member holds its own until it leaves.
        self._applied: dict[tuple[int, int], int] = {}
        self._now = now
        self._out: list[Instruction] = []

    @property
    def version(self) -> int:
        """The version of the model: the number of Applies so far."""
        return self.ledger.version

    @property
    def has_begun(self) -> bool:
        """True if all shards have weights."""
        return len(self._shards_with_weights) >= self.config.shards

    def snapshot(self) -> dict[str, Any]:
        """Return the state that a new generation starts from, as JSON values. Every worker must join it again."""
        return {
            "version": self.version,
            "shards": self.config.shards,
            "policy": self.config.policy,
            "memory": self.ledger.policy.memory(),
            "seconds": self._now,
            "incarnations": {str(worker): last for worker, last in self.incarnations.items()},
            "applied": [[*key, iteration] for key, iteration in self._newest_applied().items()],
            "samples": self.samples.as_json() if self.samples else None,
            "usual_size": self.clipping.as_json() if self.clipping else [],
        }

    def _newest_applied(self) -> dict[tuple[int, int], int]:
        """Return the newest applied iteration of each worker and incarnation."""
        members = self.roster.training.values()
        return self._applied | {
            (member.worker, member.incarnation): member.applied_iteration
            for member in members
            if member.applied_iteration
        }

    def _restore(self, snapshot: Mapping[str, Any]) -> None:
        """Start from the snapshot of an earlier generation."""
        self.ledger.version = int(snapshot["version"])
        memory = snapshot.get("memory")
        if isinstance(memory, dict) and is_same_policy(str(snapshot["policy"]), self.config.policy):
            self.ledger.policy.recall(memory)
        self.samples = Samples.from_json(snapshot["samples"]) if snapshot["samples"] else None
        self._applied = {(worker, incarnation): iteration for worker, incarnation, iteration in snapshot["applied"]}
        if self.clipping:
            self.clipping.recall(snapshot.get("usual_size", []))
        for worker, last in snapshot["incarnations"].items():
            self.incarnations[int(worker)] = max(last, self.incarnations.get(int(worker), 0))

    def _send(self, to: int | None, kind: Callable[..., Instruction], *fields: Any) -> None:
        """Add an instruction to a worker. While its connection is lost, do nothing: it resumes, and is told again."""
        if to is not None:
            self._out.append(kind(to, *fields))
