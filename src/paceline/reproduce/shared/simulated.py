"""Simulated runs without gradients. Each is cached, so that several figures can share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from paceline.observe.observer import Observer
from paceline.observe.summary import Report
from paceline.policies import make
from paceline.reproduce.shared.rows import Row, Value
from paceline.simulate import Cluster, ClusterSpec
from paceline.simulate.network import Direction

#: The models of the R²SP paper, and how the names of its clusters spell them.
MODELS = {"ResNet32": "resnet32", "AlexNet": "alexnet", "VGG16": "vgg16", "Inception-v3": "inception"}
#: The four schemes that the R²SP paper compares.
SCHEMES = {"BSP": "bsp", "ASP": "asp", "SSP(5)": "ssp:staleness=5", "R²SP": "r2sp"}
#: Schemes without a barrier or a ring. Their workers begin in lockstep and drift apart slowly.
FREE = {"ASP", "SSP(5)", "DSSP"}
JITTER = 0.05  # stands for the variation of real machines
#: The note of a row whose value the paper shows in a plot, without giving a number.
PLOTTED = "The paper only plots this."


def row(id: str, what: str, paper: Value, ours: Value, unit: str, note: str = "") -> Row:
    """Return a row whose value was simulated."""
    return Row(id, what, paper, ours, unit, "simulated", note)


def iterations(scheme: str, quick: bool) -> int:
    """Return the iterations per worker that a scheme needs to settle. Means leave out the first quarter of them."""
    if scheme in FREE:
        return 60 if quick else 200
    return 24 if quick else 60


@cache
def report(spec: ClusterSpec, policy: str, iterations: int, seed: int = 0, shared: bool = False) -> Report:
    """Simulate a run and return its report.

    shared: let overlapping transfers share the servers' links, as TCP does, even if the policy takes turns. By default,
        a policy that takes turns hands the links from one transfer to the next.
    """
    made = make(policy)
    if shared:
        made.takes_turns = False
    return Cluster(spec, made, iterations, seed).run().report


def throttled(spec: ClusterSpec, factor: float) -> ClusterSpec:
    """Return the cluster with the rate of every link multiplied by `factor`."""
    workers = tuple(replace(worker, link=worker.link * factor) for worker in spec.workers)
    return replace(spec, server_link=spec.server_link * factor, workers=workers)


@dataclass(frozen=True)
class ModelTransfer:
    """One transfer of the whole model from or to a worker."""

    worker: int
    direction: Direction
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class TransferWatcher(Observer):
    """Records the arrivals of updates, the transfers, and the utilization of the servers' links."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.transfers: list[ModelTransfer] = []
        # By direction: (time, share of the links in use from then on).
        self.uses: dict[Direction, list[tuple[float, float]]] = {"in": [(0.0, 0.0)], "out": [(0.0, 0.0)]}
        self._began: dict[tuple[int, Direction], float] = {}

    def pushing(self, time: float, worker: int) -> None:
        self._began[worker, "in"] = time

    def pulling(self, time: float, worker: int) -> None:
        self._began[worker, "out"] = time

    def arrived(
        self,
        time: float,
        worker: int,
        iteration: int,
        batch_size: int,
        loss: float | None = None,
        incarnation: int = 1,
    ) -> None:
        self.arrivals.append(time)
        self._ended(time, worker, "in")

    def pulled(self, time: float, worker: int, version: int) -> None:
        self._ended(time, worker, "out")

    def used(self, time: float, direction: str, fraction: float) -> None:
        uses = self.uses["in" if direction == "in" else "out"]
        if uses[-1][0] == time:  # transfers that begin together are reported one by one; the last report counts
            uses.pop()
        uses.append((time, fraction))

    def _ended(self, time: float, worker: int, direction: Direction) -> None:
        began = self._began.pop((worker, direction), None)
        if began is not None:  # None if the worker already has the newest model, and so transfers nothing
            self.transfers.append(ModelTransfer(worker, direction, began, time))

    # Everything below leaves out the warm-up.

    @property
    def warm_up_end(self) -> float:
        """The time at which the first quarter of the updates had arrived."""
        return self.arrivals[len(self.arrivals) // 4]

    @property
    def gaps(self) -> list[float]:
        """The times between consecutive updates: one per update after the warm-up, so that whole rounds count."""
        settled = self.arrivals[len(self.arrivals) // 4 - 1 :]
        return [after - before for before, after in pairwise(settled)]

    def settled(self, direction: Direction) -> list[ModelTransfer]:
        """Return the transfers in one direction that began after the warm-up."""
        return [each for each in self.transfers if each.direction == direction and each.began >= self.warm_up_end]

    def idle(self, direction: Direction) -> float:
        """Return the share of the time in which the servers' links carried nothing in one direction."""
        until = self.arrivals[-1]
        steps = [*self.uses[direction], (until, 0.0)]
        idle = sum(
            max(0.0, min(ends, until) - max(begins, self.warm_up_end))
            for (begins, share), (ends, _) in pairwise(steps)
            if share <= 0
        )
        return idle / (until - self.warm_up_end)


@cache
def watched(spec: ClusterSpec, policy: str, iterations: int, seed: int = 0) -> TransferWatcher:
    """Simulate a run and return its recorded transfers. The result is cached: do not modify it."""
    watch = TransferWatcher()
    Cluster(spec, make(policy), iterations, seed, observer=watch).run()
    return watch


def share(values: Sequence[float], low: float, high: float) -> float:
    """Return the share of the values from `low` to `high`, both included."""
    return sum(low <= value <= high for value in values) / max(len(values), 1)
