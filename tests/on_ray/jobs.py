"""Run a job on Ray in a thread, find its actors, and check what its model has counted and learned."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch.utils.data import DataLoader

from on_ray.loops import HURRY, POLICY, CountingClassifier, accuracy, count, numbered_digits
from paceline.ray import PacelineTrainer
from paceline.ray.controller import Controller

EPOCHS, BATCH = 4, 32
#: Of the accuracy. Another order of samples and the staleness of three workers change it by up to 0.015.
TOLERANCE = 0.03
SECONDS = 120.0  # for anything that a test waits for


class CountingJob(threading.Thread):
    """A job that trains the classifier that counts, in a thread. Its actors are forked by default."""

    def __init__(
        self, folder: Path, workers: Any = 3, epochs: int = EPOCHS, batch: int = BATCH, **options: Any
    ) -> None:
        super().__init__(daemon=True)
        self.notes, self.epochs, self.batch = folder / "notes", epochs, batch
        self.notes.mkdir(parents=True, exist_ok=True)
        loop = {"batch": batch, "epochs": epochs, "pause": 1.0, "notes": str(self.notes)}
        self.failures = options.pop("failures", FailureConfig(max_failures=5))
        scaling = options.pop("scaling", None) or ScalingConfig(num_workers=workers)
        self.trainer = PacelineTrainer(
            count,
            train_loop_config=loop,
            policy=options.pop("policy", POLICY),
            scaling_config=scaling,
            run_config=RunConfig(storage_path=str(folder / "runs"), name="job", failure_config=self.failures),
            checkpoint_every=options.pop("checkpoint_every", 0.5),
            lease=options.pop("lease", 5.0),
            fork=options.pop("fork", True),
            **options,
        )
        self.checkpoints = folder / "runs" / "job" / "paceline"
        self.result: Any = None
        self.error: BaseException | None = None

    @property
    def controller(self) -> Controller:
        """The controller of the job."""
        assert self.trainer.controller is not None
        return self.trainer.controller

    def run(self) -> None:
        try:
            self.result = self.trainer.fit()
        except BaseException as error:
            self.error = error

    def steps(self) -> dict[str, int]:
        """Return the steps of each process of a worker so far. The key is its worker's number and its process id."""
        found = {}
        for note in self.notes.glob("*-*"):
            text = note.read_text()
            found[note.name] = int(text) if text else 0
        return found

    def until(self, condition: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
        """Wait until a condition holds. Fail if the job ends before."""
        ends = time.monotonic() + seconds
        while not condition():
            assert self.is_alive(), f"the job ended before {what}: {self.error}"
            assert time.monotonic() < ends, f"no {what} within {seconds:g} s"
            time.sleep(0.05)

    def hurry(self) -> None:
        """Let the workers train without pauses from now on."""
        (self.notes / HURRY).touch()

    def until_back(self, worker: int) -> None:
        """Wait until a lost worker has been started again and has made a step."""
        self.until(lambda: len(self.processes(worker)) == 2, f"step of the new worker {worker}")

    def until_saved(self, workers: int, steps: int = 2) -> None:
        """Wait until this many workers have made some steps, and a checkpoint is written."""
        self.until(lambda: sum(each >= steps for each in self.steps().values()) >= workers, "the first steps")
        self.until(lambda: self.saved() > 0, "the first checkpoint")

    def saved(self) -> int:
        """Return the newest version of which there is a checkpoint, or 0."""
        return max((int(path.name.partition("-")[2]) for path in self.checkpoints.glob("version-?????????")), default=0)

    def processes(self, worker: int) -> list[int]:
        """Return the process ids that a worker has had."""
        return [int(name.partition("-")[2]) for name in self.steps() if name.startswith(f"{worker}-")]

    def end(self) -> Any:
        """Wait for the end of the job, and return its result.

        Its model has counted each sample once an epoch, and is as good as a model that one process trains.
        """
        self.hurry()
        self.join(SECONDS)
        assert not self.is_alive(), f"the job has not ended within {SECONDS:g} s: {self.steps()}"
        if self.error:
            raise self.error
        model = CountingClassifier(len(numbered_digits()))
        model.load_state_dict(torch.load(Path(self.result.checkpoint.path) / "model.pt"))
        assert set(model.counts.tolist()) == {float(self.epochs)}
        if (self.epochs, self.batch) == (EPOCHS, BATCH):
            assert accuracy(model.classifier) == pytest.approx(accuracy_without_faults(), abs=TOLERANCE)
        return self.result


@functools.cache
def accuracy_without_faults() -> float:
    """Return the accuracy of a model that one process trains."""
    torch.manual_seed(0)
    data = numbered_digits()
    model = CountingClassifier(len(data))
    optimizer = model.optimizer()
    for _ in range(EPOCHS):
        for batch in DataLoader(data, BATCH, shuffle=True):
            optimizer.zero_grad()
            model.loss(*batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return accuracy(model.classifier)


def node_of(actor: Any) -> str:
    """Return the id of the node on which an actor runs."""
    return str(ray._private.state.actors(actor._actor_id.hex())["Address"]["NodeID"])
