"""Trainings, each described by plain values, and the file that keeps their results.

Policy, cluster and jitter change what a Run learns only through the order of updates (`simulate.update_schedule`). So
runs with the same order are trained once, and each is timed by itself.
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
from typing import Any, TypeAlias

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
    rounds: int  # at most; a round is as many updates as there are workers
    samples: int = 0  # the first samples of the training set; 0: all
    optimizer: str = "SGD"
    momentum: float = 0.0
    nesterov: bool = False
    correct: Correction = "none"
    seed: int = 0
    jitter: float = 0.0
    goal: Goal | None = None  # where training stops
    decay: tuple[tuple[float, float], ...] = ()
    precision: Precision = "float32"
    weight_decay: float = 0.0
    augment: bool = False

    def spec(self) -> ClusterSpec:
        spec = load_cluster(self.cluster)
        return spec.with_jitter(self.jitter) if self.jitter else spec

    def schedule(self) -> UpdateSchedule:
        varies = any(worker.jitter.kind != "none" for worker in self.spec().workers)  # otherwise all seeds share one
        return _schedule(self.cluster, self.policy, self.rounds, self.jitter, self.seed if varies else 0)

    def task(self, data: Data, device: str) -> Task:
        settings: dict[str, float | bool] = {"lr": self.rate}
        if self.momentum:
            settings["momentum"] = self.momentum
        if self.nesterov:
            settings["nesterov"] = True
        if self.weight_decay:
            settings["weight_decay"] = self.weight_decay
        optimizer = OptimizerSpec(self.optimizer, (settings,))
        how: dict[str, Any] = {"precision": self.precision, "augment": self.augment}
        return Task(self.network, data, optimizer, self.seed, self.decay, self.correct, device, **how)

    def described(self) -> str:
        """Return a one-line description."""
        parts = [self.network, self.policy, f"rate {self.rate:g}", f"seed {self.seed}"]
        if self.correct != "none":
            parts.insert(2, self.correct)
        return ", ".join(parts)


class TrainingCurve(msgspec.Struct, frozen=True):
    """The losses and accuracies of a training, round by round, without times."""

    key: str  # what the training depends on: see `key_of`
    loss: tuple[float, ...]  # by round: the mean of its updates
    samples: tuple[int, ...]  # by round: the samples applied to the model so far
    accuracy: dict[int, float]  # on the test set, by round
    ended: str
    device: str
    tested: tuple[float, float] | None = None  # loss and accuracy on the test set, at the end


class Trained(msgspec.Struct, frozen=True):
    """A Run with what it learned and when."""

    run: Run
    learned: TrainingCurve
    seconds: tuple[float, ...]  # the end of each round
    iteration_seconds: float
    staleness: float

    def reaches(self, goal: Goal) -> int | None:
        """Return the round in which the goal was reached; None if it was not."""
        if goal.kind == "accuracy":
            return next((at for at, value in sorted(self.learned.accuracy.items()) if value >= goal.value), None)
        held = 0
        for at, value in enumerate(self.learned.loss):
            held = held + 1 if value <= goal.value else 0
            if held >= goal.hold:
                return at
        return None

    def best(self, kind: str) -> float:
        """Return the highest accuracy or the lowest loss of any round."""
        if kind == "accuracy":
            return max(self.learned.accuracy.values(), default=math.nan)
        return min(self.learned.loss, default=math.nan)


#: Settings that were added after results had been kept, and their defaults.
LATER_SETTINGS: dict[str, object] = {"weight_decay": 0.0, "augment": False}


def key_of(run: Run) -> str:
    """Return what the training depends on, as JSON. The order of updates replaces policy, cluster and jitter."""
    order = run.schedule().order
    same = msgspec.to_builtins(msgspec.structs.replace(run, cluster="", policy=order, jitter=0.0))
    for name, default in LATER_SETTINGS.items():
        if same[name] == default:
            del same[name]  # results that were kept before the setting existed stay valid
    return msgspec.json.encode(same, order="sorted").decode()


def learn(
    run: Run, folder: Path | None, device: str, progress: Callable[[TrainingOutcome], None] | None = None
) -> TrainingCurve:
    """Train one run and return what it learned."""
    data = _data(run.data, folder, run.samples)
    policy = make(run.policy)
    outcome = train(run.spec(), policy, run.task(data, device), run.goal, run.rounds, progress=progress)
    gc.collect()  # frees reference cycles of graphs and weights before the next training
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
    """Carries out trainings, several at a time, and keeps their results in a file so that none is repeated."""

    def __init__(
        self,
        folder: Path | None = None,
        device: str = "cpu",
        jobs: int = 1,
        kept: Path | None = None,
        progress: Callable[[int, int, str], None] | None = None,
        stop_at: Callable[[], bool] | None = None,
    ) -> None:
        """Read the results that `kept` holds.

        folder: where data sets are.
        jobs: how many trainings run at the same time.
        kept: a file with one result per line.
        progress: called with the number of finished trainings, their total, and a description of one of them.
        stop_at: once this returns True, no training begins any more, and missing results are left out.
        """
        self._folder, self._device, self.jobs, self._kept = folder, device, jobs, kept
        self._progress = progress or (lambda done, total, what: None)
        self._stop_at = stop_at or (lambda: False)
        self._learned: dict[str, TrainingCurve | Federated] = {}
        self._pool: ProcessPoolExecutor | None = None
        self.left_out: set[str] = set()  # keys of wanted trainings that did not begin
        if kept and kept.exists():
            lines = kept.read_bytes().splitlines()
            for line in lines:
                if learned := _read(line):
                    self._learned[learned.key] = learned
            if lines and not self._learned:
                raise TrainingError(f"{kept} holds no trainings. Name another file with --keep.")

    def __call__(self, runs: Iterable[Run]) -> dict[Run, Trained]:
        """Carry out the runs and return their results. Runs that were stopped before they began are left out."""
        wanted = {run: key_of(run) for run in runs}
        self._run_missing({key: run for run, key in wanted.items()})
        found = ((run, self._learned.get(key)) for run, key in wanted.items())
        return {run: self._with_times(run, learned) for run, learned in found if isinstance(learned, TrainingCurve)}

    def federated(self, runs: Iterable[Federation]) -> dict[Federation, Federated]:
        """Carry out federated trainings and return their results. Those that did not begin are left out."""
        wanted = list(runs)
        self._run_missing({run.key: run for run in wanted})
        found = ((run, self._learned.get(run.key)) for run in wanted)
        return {run: learned for run, learned in found if isinstance(learned, Federated)}

    def _run_missing(self, wanted: Mapping[str, AnyRun]) -> None:
        """Carry out the trainings whose results are not there yet."""
        todo = [run for key, run in wanted.items() if key not in self._learned]
        if self.jobs == 1 or len(todo) < 2:
            for index, run in enumerate(todo):
                if not self._stop_at():
                    self._progress(index, len(todo), run.described())
                    self._record(_carry_out(run, self._folder, self._device))
        else:
            self._run_in_processes(todo)
        self.left_out |= wanted.keys() - self._learned.keys()

    def report_progress(self, done: int, total: int) -> None:
        """Report the progress of trainings that this object does not run itself."""
        self._progress(done, total, "in parallel")

    @property
    def keeps(self) -> bool:
        """Whether finished trainings are kept in a file."""
        return self._kept is not None

    def close(self) -> None:
        """Stop the worker processes."""
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _run_in_processes(self, todo: Sequence[AnyRun]) -> None:
        if self._pool is None:  # The pool is reused, because importing torch and initializing a GPU takes seconds.
            context = multiprocessing.get_context("spawn")  # CUDA cannot be used after a fork
            self._pool = ProcessPoolExecutor(self.jobs, context)
        try:
            futures = {self._pool.submit(_carry_out, run, self._folder, self._device): run for run in todo}
            done = 0
            for future in as_completed(futures):
                if future.cancelled():
                    continue
                self._record(future.result())
                done += 1
                self._progress(done, len(todo), futures[future].described())
                if self._stop_at():
                    for each in futures:  # has no effect on trainings that have begun: their results still come
                        each.cancel()
        except BaseException:
            self.close()
            raise

    def _with_times(self, run: Run, learned: TrainingCurve) -> Trained:
        planned = run.schedule()
        workers = len(run.spec().workers)
        rounds = range(len(learned.loss))
        seconds = tuple(planned.seconds[min((at + 1) * workers, len(planned.seconds)) - 1] for at in rounds)
        report = planned.report
        return Trained(run, learned, seconds, report.mean_iteration_seconds, planned.mean_staleness)

    def _record(self, learned: TrainingCurve | Federated) -> None:
        if learned.key in self._learned:
            return
        self._learned[learned.key] = learned
        if self._kept:
            with self._kept.open("ab") as file:
                file.write(msgspec.json.encode(learned) + b"\n")


def _read(line: bytes) -> TrainingCurve | Federated | None:
    """Return the result on a line of the file; None if the line is incomplete because writing was interrupted."""
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(line, type=TrainingCurve)
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(line, type=Federated)
    return None


def _carry_out(run: AnyRun, folder: Path | None, device: str) -> TrainingCurve | Federated:
    try:
        return federate(run, folder, device) if isinstance(run, Federation) else learn(run, folder, device)
    except torch.OutOfMemoryError:
        raise TrainingError(f"{run.described()}: {device} is out of memory. Use a lower --jobs.") from None


@cache
def _data(name: str, folder: Path | None, samples: int) -> Data:
    data = load(name, folder)
    return data.limited(samples) if samples else data


@cache
def _schedule(cluster: str, policy: str, rounds: int, jitter: float, seed: int) -> UpdateSchedule:
    spec = load_cluster(cluster)
    return update_schedule(spec.with_jitter(jitter) if jitter else spec, make(policy), rounds, seed)
