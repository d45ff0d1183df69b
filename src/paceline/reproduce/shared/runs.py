"""Trainings by name: a Run says all that a training depends on in plain values, so that it is done once and kept.

What it learns depends on the order of updates alone (`simulate.schedule`), so runs with the same order are trained once
and timed each.
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch

from paceline.model.correction import Correction
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.policies import make
from paceline.reproduce.shared.federation import Federated, Federation, federate
from paceline.simulate import load_cluster
from paceline.simulate.cluster_spec import ClusterSpec
from paceline.simulate.task import Goal, Precision, Task, TrainingError, TrainingOutcome
from paceline.simulate.training import train
from paceline.simulate.update_schedule import UpdateSchedule, update_schedule
from paceline.workloads.data import Data, load


class Run(msgspec.Struct, frozen=True):
    """One training under the virtual clock."""

    cluster: str
    policy: str
    network: str
    data: str
    rate: float
    rounds: int  # at most: as many updates as there are workers make a round
    samples: int = 0  # of the training set; 0: all
    optimizer: str = "SGD"
    momentum: float = 0.0
    nesterov: bool = False
    correct: Correction = "none"
    seed: int = 0
    jitter: float = 0.0
    goal: Goal | None = None  # beyond which there is no need to go on
    decay: tuple[tuple[float, float], ...] = ()
    precision: Precision = "float32"

    def spec(self) -> ClusterSpec:
        spec = load_cluster(self.cluster)
        return spec.with_jitter(self.jitter) if self.jitter else spec

    def schedule(self) -> UpdateSchedule:
        return _schedule(self.cluster, self.policy, self.rounds, self.jitter, self.seed if self.jitter else 0)

    def task(self, data: Data, device: str) -> Task:
        settings: dict[str, float | bool] = {"lr": self.rate}
        if self.momentum:
            settings["momentum"] = self.momentum
        if self.nesterov:
            settings["nesterov"] = True
        optimizer = OptimizerSpec(self.optimizer, (settings,))
        return Task(
            self.network, data, optimizer, self.seed, self.decay, self.correct, device, precision=self.precision
        )

    def described(self) -> str:
        """In a line."""
        parts = [self.network, self.policy, f"rate {self.rate:g}", f"seed {self.seed}"]
        if self.correct != "none":
            parts.insert(2, self.correct)
        return ", ".join(parts)


class TrainingCurve(msgspec.Struct, frozen=True):
    """What a training came to, round by round, whenever that was."""

    key: str  # what it depends on
    loss: tuple[float, ...]  # the mean of each round's updates
    samples: tuple[int, ...]  # that had changed the model by then
    accuracy: dict[int, float]  # round → on the test set
    ended: str
    device: str
    tested: tuple[float, float] | None = None  # loss and accuracy on the test set, at the end


class Trained(msgspec.Struct, frozen=True):
    """A Run, done."""

    run: Run
    learned: TrainingCurve
    seconds: tuple[float, ...]  # when each round was over
    iteration_seconds: float
    staleness: float

    def reaches(self, goal: Goal) -> int | None:
        """The round in which the goal was reached; None if it was not."""
        if goal.kind == "accuracy":
            return next((at for at, value in sorted(self.learned.accuracy.items()) if value >= goal.value), None)
        held = 0
        for at, value in enumerate(self.learned.loss):
            held = held + 1 if value <= goal.value else 0
            if held >= goal.hold:
                return at
        return None

    def best(self, kind: str) -> float:
        """How near it came."""
        if kind == "accuracy":
            return max(self.learned.accuracy.values(), default=math.nan)
        return min(self.learned.loss, default=math.nan)


def key_of(run: Run) -> str:
    """What the training depends on: the run, with the order of updates in the place of whatever led to it."""
    order = run.schedule().order
    same = msgspec.structs.replace(run, cluster="", policy=order, jitter=0.0)
    return msgspec.json.encode(same, order="sorted").decode()


def learn(
    run: Run, folder: Path | None, device: str, progress: Callable[[TrainingOutcome], None] | None = None
) -> TrainingCurve:
    """Train."""
    data = _data(run.data, folder, run.samples)
    policy = make(run.policy)
    outcome = train(run.spec(), policy, run.task(data, device), run.goal, run.rounds, progress=progress)
    gc.collect()  # graphs and weights hold on to one another, and the next training needs their memory
    if outcome.ended == "interrupted":
        raise KeyboardInterrupt
    curve = outcome.curve
    return TrainingCurve(
        key_of(run),
        tuple(float(f"{point.loss:.5g}") for point in curve if math.isfinite(point.loss)),
        tuple(point.samples for point in curve),
        {at: round(point.accuracy, 5) for at, point in enumerate(curve) if point.accuracy is not None},
        outcome.ended,
        device,
        outcome.tested,
    )


AnyRun: TypeAlias = Run | Federation


class Runs:
    """Carries out Runs, several at a time, and keeps what they came to in a file, so that none is done twice."""

    def __init__(
        self,
        folder: Path | None = None,
        device: str = "cpu",
        jobs: int = 1,
        kept: Path | None = None,
        say: Callable[[int, int, str], None] | None = None,
        stop_at: Callable[[], bool] | None = None,
    ) -> None:
        """kept: a file of what was learned, one a line. say: hears how many of how many are done, and of which.

        stop_at: once it says so, nothing more is begun, and what is missing is left out.
        """
        self._folder, self._device, self.jobs, self._kept = folder, device, jobs, kept
        self._say = say or (lambda done, of, what: None)
        self._stop_at = stop_at or (lambda: False)
        self._learned: dict[str, TrainingCurve | Federated] = {}
        self._pool: ProcessPoolExecutor | None = None
        self.left_out: set[str] = set()  # trainings that were asked for and not begun, by key
        if kept and kept.exists():
            lines = kept.read_bytes().splitlines()
            for line in lines:
                if learned := _read(line):
                    self._learned[learned.key] = learned
            if lines and not self._learned:
                raise TrainingError(f"{kept} holds no trainings; keep them in another file.")

    def __call__(self, runs: Iterable[Run]) -> dict[Run, Trained]:
        """All of them, done; but for what was stopped."""
        wanted = {run: key_of(run) for run in runs}
        self._do({key: run for run, key in wanted.items()})
        found = ((run, self._learned.get(key)) for run, key in wanted.items())
        return {run: self._timed(run, learned) for run, learned in found if isinstance(learned, TrainingCurve)}

    def federated(self, runs: Iterable[Federation]) -> dict[Federation, Federated]:
        """All of them, done; but for what was stopped."""
        wanted = list(runs)
        self._do({run.key: run for run in wanted})
        found = ((run, self._learned.get(run.key)) for run in wanted)
        return {run: learned for run, learned in found if isinstance(learned, Federated)}

    def _do(self, wanted: Mapping[str, AnyRun]) -> None:
        """See that they are done, each once."""
        todo = [run for key, run in wanted.items() if key not in self._learned]
        if self.jobs == 1 or len(todo) < 2:
            for index, run in enumerate(todo):
                if not self._stop_at():
                    self._say(index, len(todo), run.described())
                    self._note(_carried_out(run, self._folder, self._device))
        else:
            self._side_by_side(todo)
        self.left_out |= wanted.keys() - self._learned.keys()

    def said(self, done: int, of: int) -> None:
        """How far trainings are that are not Runs."""
        self._say(done, of, "side by side")

    @property
    def keeps(self) -> bool:
        """Is what is finished kept in a file?"""
        return self._kept is not None

    def close(self) -> None:
        """End the processes that ran several at a time."""
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _side_by_side(self, todo: Sequence[AnyRun]) -> None:
        if self._pool is None:  # and kept: to import torch and wake a GPU takes seconds
            context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
            self._pool = ProcessPoolExecutor(self.jobs, context)
        try:
            futures = {self._pool.submit(_carried_out, run, self._folder, self._device): run for run in todo}
            done = 0
            for future in as_completed(futures):
                if future.cancelled():
                    continue
                self._note(future.result())
                done += 1
                self._say(done, len(todo), futures[future].described())
                if self._stop_at():
                    for each in futures:  # those that have begun are waited for
                        each.cancel()
        except BaseException:
            self.close()
            raise

    def _timed(self, run: Run, learned: TrainingCurve) -> Trained:
        planned = run.schedule()
        workers = len(run.spec().workers)
        rounds = range(len(learned.loss))
        seconds = tuple(planned.seconds[min((at + 1) * workers, len(planned.seconds)) - 1] for at in rounds)
        report = planned.report
        return Trained(run, learned, seconds, report.mean_iteration_seconds, planned.mean_staleness)

    def _note(self, learned: TrainingCurve | Federated) -> None:
        if learned.key in self._learned:
            return
        self._learned[learned.key] = learned
        if self._kept:
            with self._kept.open("ab") as file:
                file.write(msgspec.json.encode(learned) + b"\n")


def _read(line: bytes) -> TrainingCurve | Federated | None:
    """What was kept; None of the last line, of one that was interrupted."""
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(line, type=TrainingCurve)
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(line, type=Federated)
    return None


def _carried_out(run: AnyRun, folder: Path | None, device: str) -> TrainingCurve | Federated:
    try:
        return federate(run, folder, device) if isinstance(run, Federation) else learn(run, folder, device)
    except torch.OutOfMemoryError:
        said = f"{run.described()}: the memory of {device} is not enough; ask for fewer --jobs at a time."
        raise TrainingError(said) from None


@cache
def _data(name: str, folder: Path | None, samples: int) -> Data:
    data = load(name, folder)
    return data.limited(samples) if samples else data


@cache
def _schedule(cluster: str, policy: str, rounds: int, jitter: float, seed: int) -> UpdateSchedule:
    spec = load_cluster(cluster)
    return update_schedule(spec.with_jitter(jitter) if jitter else spec, make(policy), rounds, seed)
