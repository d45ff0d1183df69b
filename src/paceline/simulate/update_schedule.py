"""The order in which a policy lets updates change the model, and when. No tensors are involved.

The outcome of a training depends on that order alone: which updates were applied, and which version each was computed
from. Two runs with the same order learn the same, however different their times. So BSP and pipelined BSP are trained
once and timed twice, and so is any policy whose order does not change with jitter.
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
    """A run without gradients."""

    order: str  # a hash; two runs with equal hashes learn the same
    seconds: tuple[float, ...]  # when each update changed the model
    staleness: tuple[int, ...]  # of each update, in the same order
    report: Report

    @property
    def mean_staleness(self) -> float:
        return sum(self.staleness) / max(len(self.staleness), 1)


class _OrderRecorder(CountedModel):
    """Records the order of the updates in place of a model."""

    def __init__(self) -> None:
        self.order = hashlib.blake2b(digest_size=16)
        self.seconds: list[float] = []
        self.staleness: list[int] = []
        self._version = 0
        self._expected: dict[int, int] = {}  # worker → staleness for which its weights are predicted; −1: unknown

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
        # The order of updates within one Apply makes no difference.
        self.order.update(b"".join((*sorted(together), struct.pack("<d", -1.0 if apply.mix is None else apply.mix))))
        self._version += 1
        return []


def update_schedule(
    spec: ClusterSpec, policy: Policy, rounds: int, seed: int = 0, streamed: bool = False
) -> UpdateSchedule:
    """Simulate `rounds` rounds, each of as many updates as there are workers. Return the schedule of the updates."""
    recorder = _OrderRecorder()
    result = Cluster(spec, policy, rounds, seed, streamed, model=recorder).run()
    return UpdateSchedule(recorder.order.hexdigest(), tuple(recorder.seconds), tuple(recorder.staleness), result.report)
