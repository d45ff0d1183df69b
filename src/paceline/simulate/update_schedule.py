"""The order in which a policy lets updates change the model, and when; without any tensors.

What a run learns depends on that order alone: on who applied what, in which order, from which version. Two runs with
the same order learn the same, however different their times. So BSP and pipelined BSP are trained once and timed
twice, and so is a scheme whose order jitter does not change.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from paceline.observe.summary import Report
from paceline.policies import Apply, Policy
from paceline.simulate.cluster import Cluster
from paceline.simulate.cluster_spec import ClusterSpec
from paceline.simulate.simulated_model import CountedModel


@dataclass(frozen=True)
class UpdateSchedule:
    """A run without its gradients."""

    order: str  # equal where the order is
    seconds: tuple[float, ...]  # when each update had changed the model
    staleness: tuple[int, ...]  # of each update
    report: Report

    @property
    def mean_staleness(self) -> float:
        return sum(self.staleness) / max(len(self.staleness), 1)


class _Notes(CountedModel):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.order = hashlib.blake2b(digest_size=16)
        self.seconds: list[float] = []
        self.staleness: list[int] = []
        self._version = 0
        self._expected: dict[int, int] = {}  # by worker; weights may be handed out as they are expected to be

    def pull(self, worker: int, staleness: int | None) -> None:
        self._expected[worker] = -1 if staleness is None else staleness

    def apply(self, apply: Apply, time: float) -> list[float]:
        together = []
        for update, weight in zip(apply.updates, apply.weights, strict=True):
            identity = (update.worker, update.iteration, update.base_version, update.batch_size)
            expected = self._expected.get(update.worker, -1)
            together.append(struct.pack("<qqqqqd", *identity, expected, weight))
            self.seconds.append(time)
            self.staleness.append(self._version - update.base_version)
        # In which order those that are applied together are added up makes no difference.
        self.order.update(b"".join((*sorted(together), struct.pack("<d", -1.0 if apply.mix is None else apply.mix))))
        self._version += 1
        return []


def update_schedule(
    spec: ClusterSpec, policy: Policy, rounds: int, seed: int = 0, streamed: bool = False
) -> UpdateSchedule:
    """Simulate so many rounds, a round being as many updates as there are workers."""
    notes = _Notes()
    result = Cluster(spec, policy, rounds, seed, streamed, model=notes).run()
    return UpdateSchedule(notes.order.hexdigest(), tuple(notes.seconds), tuple(notes.staleness), result.report)
