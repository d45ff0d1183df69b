"""Federated trainings, each described by plain values: a Federation is also the key under which its result is kept."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean

import msgspec

from paceline.federated.partition import Skew, dirichlet
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.policies import make
from paceline.policies.filtered import Filtered
from paceline.simulate import load_cluster
from paceline.simulate.task import Goal, LocalSettings, Precision, Task
from paceline.simulate.training import Shares, train
from paceline.workloads.data import Data, load


class Federation(msgspec.Struct, frozen=True):
    """One federated training under the virtual clock."""

    cluster: str
    policy: str
    network: str
    data: str
    rounds: int  # at most; a round is as many updates as there are clients
    steps: int  # τ, local iterations
    batch: int = 16
    rate: float = 0.01
    clients: int = 0  # the first clients of the cluster; 0: all
    samples: int = 390  # per client
    outliers: float = 0.25  # share of the clients that are outliers
    odd: float = 0.1  # Dirichlet α of outliers
    seed: int = 0
    every: int = 4  # rounds between tests of the accuracy
    proximal: float = 0.0
    precision: Precision = "float32"

    @property
    def key(self) -> str:
        """All settings, as JSON.

        Unlike a Run's key, it holds the policy and not the order of updates. A filter for outliers makes that order
        depend on what is learned, so it is not known in advance.
        """
        return msgspec.json.encode(self, order="sorted").decode()

    def described(self) -> str:
        """Return a one-line description."""
        odd = f"{self.outliers:.0%} outliers with α {self.odd:g}"
        return f"{self.network}, {self.policy}, {odd}, seed {self.seed}"


class Federated(msgspec.Struct, frozen=True):
    """The result of a federated training."""

    key: str
    tests: tuple[tuple[float, float], ...]  # (simulated seconds, accuracy)
    loss: tuple[float, ...]  # by round
    round_seconds: float
    clients: int
    outliers: tuple[int, ...]
    blacklist: dict[int, tuple[float, ...]]
    ended: str
    device: str

    @property
    def final(self) -> float:
        """The final accuracy: the mean of the last five tests."""
        return mean(accuracy for _, accuracy in self.tests[-5:]) if self.tests else math.nan

    def time_to(self, accuracy: float, hold: int = 3) -> float | None:
        """Return when the mean of `hold` consecutive tests first reached the accuracy; None if it never did."""
        for at in range(hold - 1, len(self.tests)):
            if mean(value for _, value in self.tests[at - hold + 1 : at + 1]) >= accuracy:
                return self.tests[at][0]
        return None

    @property
    def detected(self) -> float:
        """The share of the outliers that were blacklisted."""
        return len(self.blacklist.keys() & set(self.outliers)) / len(self.outliers) if self.outliers else math.nan

    @property
    def wrongly_blacklisted(self) -> float:
        """The share of the other clients that were blacklisted."""
        others = self.clients - len(self.outliers)
        return len(self.blacklist.keys() - set(self.outliers)) / others


def federate(run: Federation, folder: Path | None, device: str) -> Federated:
    """Run one federated training under the virtual clock."""
    data = _data(run.data, folder)
    spec = load_cluster(run.cluster)
    if run.clients:
        spec = replace(spec, workers=spec.workers[: run.clients])
    clients = len(spec.workers)
    alphas = Skew(run.outliers, odd=run.odd).alphas(clients, run.seed)
    shares = Shares(dirichlet(data.labels, alphas, run.samples, run.seed), run.seed)
    task = Task(
        run.network,
        data,
        OptimizerSpec("SGD", ({"lr": run.rate},)),
        run.seed,
        device=device,
        local=LocalSettings(run.steps, run.batch, run.proximal),
        precision=run.precision,
    )
    policy = make(run.policy)
    goal = Goal("accuracy", 1.1, every=run.every)  # out of reach, so that the run does not stop early
    outcome = train(spec, policy, task, goal, run.rounds, shares=shares)
    gc.collect()  # frees reference cycles of graphs and weights before the next training
    if outcome.ended == "interrupted":
        raise KeyboardInterrupt
    return Federated(
        run.key,
        tuple(
            (round(point.seconds, 3), round(point.accuracy, 5)) for point in outcome.curve if point.accuracy is not None
        ),
        tuple(float(f"{point.loss:.5g}") for point in outcome.curve if math.isfinite(point.loss)),
        outcome.report.mean_iteration_seconds if outcome.report else math.nan,
        clients,
        tuple(client for client, alpha in enumerate(alphas) if alpha < 1),
        dict(policy.blacklist) if isinstance(policy, Filtered) else {},
        outcome.ended,
        device,
    )


@cache
def _data(name: str, folder: Path | None) -> Data:
    return load(name, folder)
