"""Runs under the virtual clock that need no gradients: each is done once, however many figures ask for it."""

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

#: The models of the R²SP paper, as it writes them, and as its clusters are called.
MODELS = {"ResNet32": "resnet32", "AlexNet": "alexnet", "VGG16": "vgg16", "Inception-v3": "inception"}
#: The four schemes that the R²SP paper compares.
SCHEMES = {"BSP": "bsp", "ASP": "asp", "SSP(5)": "ssp:staleness=5", "R²SP": "r2sp"}
#: Those that bind workers to nothing but their own progress: they begin in lockstep and leave it slowly.
FREE = {"ASP", "SSP(5)", "DSSP"}
JITTER = 0.05  # where one is taken to stand for real machines
DRAWN = "Drawn only."


def row(id: str, what: str, paper: Value, ours: Value, unit: str, note: str = "") -> Row:
    return Row(id, what, paper, ours, unit, "simulated", note)


def iterations(scheme: str, quick: bool) -> int:
    """How many of each worker settle a scheme: its means leave out the first quarter."""
    if scheme in FREE:
        return 60 if quick else 200
    return 24 if quick else 60


@cache
def report(spec: ClusterSpec, policy: str, iterations: int, seed: int = 0, shared: bool = False) -> Report:
    """What a run came to.

    shared: let transfers share the servers' links, as TCP does, though the policy takes turns and would hand them on.
    """
    made = make(policy)
    if shared:
        made.takes_turns = False
    return Cluster(spec, made, iterations, seed).run().report


def throttled(spec: ClusterSpec, factor: float) -> ClusterSpec:
    """The same cluster with every link that many times as fast."""
    workers = tuple(replace(worker, link=worker.link * factor) for worker in spec.workers)
    return replace(spec, server_link=spec.server_link * factor, workers=workers)


@dataclass(frozen=True)
class ModelTransfer:
    """A whole model, from or to one worker."""

    worker: int
    direction: Direction
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class TransferWatcher(Observer):
    """Notes when updates arrived, what was transferred, and how full the servers' links were."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.transfers: list[ModelTransfer] = []
        # From when on which share; nothing until something is said of it.
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
        if uses[-1][0] == time:  # transfers that begin together are told of one by one
            uses.pop()
        uses.append((time, fraction))

    def _ended(self, time: float, worker: int, direction: Direction) -> None:
        began = self._began.pop((worker, direction), None)
        if began is not None:  # who has the newest model already pulls none
            self.transfers.append(ModelTransfer(worker, direction, began, time))

    # Of what followed the warm-up

    @property
    def since(self) -> float:
        """When the first quarter of the updates had arrived."""
        return self.arrivals[len(self.arrivals) // 4]

    @property
    def gaps(self) -> list[float]:
        """Times between updates that followed one another: as many as updates, so that of each round all count."""
        settled = self.arrivals[len(self.arrivals) // 4 - 1 :]
        return [after - before for before, after in pairwise(settled)]

    def settled(self, direction: Direction) -> list[ModelTransfer]:
        """Transfers that began after it."""
        return [each for each in self.transfers if each.direction == direction and each.began >= self.since]

    def idle(self, direction: Direction) -> float:
        """The share of the time for which the servers' links carried nothing that way."""
        until = self.arrivals[-1]
        steps = [*self.uses[direction], (until, 0.0)]
        idle = sum(
            max(0.0, min(ends, until) - max(begins, self.since))
            for (begins, share), (ends, _) in pairwise(steps)
            if share <= 0
        )
        return idle / (until - self.since)


@cache
def watched(spec: ClusterSpec, policy: str, iterations: int, seed: int = 0) -> TransferWatcher:
    """The same run, watched. Not to be written to."""
    watch = TransferWatcher()
    Cluster(spec, make(policy), iterations, seed, observer=watch).run()
    return watch


def share(values: Sequence[float], low: float, high: float) -> float:
    """Which share of the values lies within."""
    return sum(low <= value <= high for value in values) / max(len(values), 1)
