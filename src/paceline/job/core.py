"""The books of a job, which all its parts share: members, versions, samples, and the instructions of one event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.job.accounting import Ledger, Watcher
from paceline.job.config import JobConfig
from paceline.job.instructions import Instruction
from paceline.job.leases import Leases
from paceline.job.membership import Roster
from paceline.job.samples import Samples
from paceline.policies import Policy


class JobCore:
    """What is known of a job."""

    def __init__(self, policy: Policy, config: JobConfig, watcher: Watcher, restored: bool, now: float) -> None:
        self.config = config
        self.ledger = Ledger(policy, watcher)
        self.roster = Roster(config.workers, config.awaited, restored)
        self.leases = Leases(config.lease)
        self.samples: Samples | None = None
        self.incarnations: dict[int, int] = dict(config.incarnations)  # worker → its last one
        self._begun: set[int] = set()  # shards that have weights to begin with
        # worker, incarnation → its newest iteration that was applied; of those that train, the member knows it
        self._applied: dict[tuple[int, int], int] = {}
        self._now = now
        self._out: list[Instruction] = []

    @property
    def version(self) -> int:
        """Of the model."""
        return self.ledger.version

    @property
    def has_begun(self) -> bool:
        """Do all shards have weights?"""
        return len(self._begun) >= self.config.shards

    def snapshot(self) -> dict[str, Any]:
        """What a restored job goes on with, in values that JSON knows: everybody joins anew."""
        return {
            "version": self.version,
            "shards": self.config.shards,
            "policy": self.config.policy,
            "memory": self.ledger.policy.memory(),
            "seconds": self._now,
            "incarnations": {str(worker): last for worker, last in self.incarnations.items()},
            "applied": [[*key, iteration] for key, iteration in self._newest_applied().items()],
            "samples": self.samples.as_json() if self.samples else None,
        }

    def _newest_applied(self) -> dict[tuple[int, int], int]:
        """Of each worker and incarnation, the newest iteration that was applied."""
        members = self.roster.training.values()
        return self._applied | {(each.worker, each.incarnation): each.applied for each in members if each.applied}

    def _restore(self, snapshot: Mapping[str, Any]) -> None:
        self.ledger.version = int(snapshot["version"])
        if snapshot["policy"] == self.config.policy and isinstance(memory := snapshot.get("memory"), dict):
            self.ledger.policy.recall(memory)
        self.samples = Samples.from_json(snapshot["samples"]) if snapshot["samples"] else None
        self._applied = {(worker, incarnation): iteration for worker, incarnation, iteration in snapshot["applied"]}
        for worker, last in snapshot["incarnations"].items():
            self.incarnations[int(worker)] = max(last, self.incarnations.get(int(worker), 0))

    def _send(self, to: int | None, kind: Callable[..., Instruction], *fields: Any) -> None:
        """Tell a worker something, unless its connection is lost: it is told again when it is back."""
        if to is not None:
            self._out.append(kind(to, *fields))
