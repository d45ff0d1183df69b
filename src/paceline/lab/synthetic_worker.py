"""A synthetic worker: it waits for as long as computing would take, and then moves real bytes.

It makes its gradient once. Each iteration sends the gradient, the server applies it, and the worker receives the new
weights. So a run measures everything in a training step but the computation. A worker's gradient is always the same, so
the last model shows how many updates of each worker it contains (`difference`). In a cluster with local steps an
iteration is a round of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from paceline.model.description import Description
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.serve.wire.messages import GrantIteration
from paceline.serve.worker.client import Client
from paceline.simulate.cluster_spec import WorkerSpec, worker_rng
from paceline.simulate.compute_times import ComputeTimes

RATE = 1e-3  # the learning rate


@dataclass(frozen=True)
class SyntheticTask:
    """The task of a synthetic worker: where it connects, how long it computes, and when it stops."""

    address: tuple[str, int]
    token: bytes
    number: int
    spec: WorkerSpec
    model_bytes: float
    seed: int = 0
    overlap: bool = False  # push the gradient while it is computed
    iterations: int | None = None  # None: until the job ends
    local_steps: int = 1  # of an iteration
    computes_meanwhile: bool = False  # compute the next round during an exchange


class SyntheticBackward:
    """The last two thirds of computing. They produce the gradient at an even rate, from its end to its beginning."""

    def __init__(self, elements: int, began: float, seconds: float) -> None:
        self._elements, self._began, self._seconds = elements, began, seconds

    def wait(self, start: int) -> None:
        """Wait until the gradient is computed from element `start` to its end."""
        done = 1 - start / self._elements
        wait_until(self._began + self._seconds * (1 + 2 * done) / 3)

    def outcome(self) -> tuple[float, float | None]:
        return self._seconds, None


def description(model_bytes: float, local_steps: int = 1) -> Description:
    """Return the description of a model of this size, trained by plain SGD."""
    elements = max(1, round(model_bytes / 4))
    layout, optimizer = Layout((Tensor("model", (elements,)),)), OptimizerSpec("SGD", ({"lr": RATE},))
    return Description(layout, optimizer, local_steps=local_steps > 1)


def gradient_of(number: int, elements: int) -> npt.NDArray[np.float32]:
    """Return the gradient of a worker, which is the same in every iteration."""
    return np.random.default_rng(number).standard_normal(elements, dtype=np.float32)


def wait_until(moment: float) -> None:
    """Wait until this time of `time.perf_counter`."""
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


def work(task: SyntheticTask, pipe: Connection) -> None:
    """Take part in a job. If the number of iterations is given, send the model after the last one through the pipe."""
    worker = SyntheticWorker(task)
    worker.train()
    pipe.send(worker.finish())


@dataclass(frozen=True)
class Computing:
    """A gradient, or the steps of a round. A part may still be computed during the push."""

    batch: int
    began: float
    seconds: float  # that it takes in all
    spent: float  # before the push


class SyntheticWorker:
    """A member of a job that waits instead of computing."""

    def __init__(self, task: SyntheticTask) -> None:
        described = description(task.model_bytes, task.local_steps)
        self._task, self._elements = task, described.layout.size
        self._gradient, self._weights = gradient_of(task.number, self._elements), np.zeros(self._elements, np.float32)
        self._times = ComputeTimes(task.spec, worker_rng(task.number, task.seed), task.local_steps)
        self._client = Client(task.address, described.as_json(), task.token, task.number)
        self._client.keeps_unsent = True  # its weights do not matter

    def train(self) -> None:
        """Compute and exchange as often as the task says."""
        granted = self._client.begin(self._weights.data.cast("B"))
        if self._task.computes_meanwhile:
            self._compute_meanwhile(granted)
            return
        done = 0
        while done != self._task.iterations:
            granted = self._exchange(self._compute(granted))
            done += 1

    def finish(self) -> npt.NDArray[np.float32]:
        """Leave the job when it is over, and return the last model."""
        while not self._client.finish(self._weights.data.cast("B")):
            pass
        self._client.close()
        return self._weights

    def _compute_meanwhile(self, granted: GrantIteration) -> None:
        """Compute each round but the first while the one before is exchanged."""
        computed, done = self._compute(granted), 0
        with ThreadPoolExecutor(1) as thread:
            while done != self._task.iterations:
                exchange = thread.submit(self._exchange, computed)
                done += 1
                if done != self._task.iterations:
                    computed = self._compute(granted)
                granted = exchange.result()

    def _compute(self, granted: GrantIteration) -> Computing:
        """Wait until the computing is done, or until its last two thirds begin if they overlap with the push."""
        task = self._task
        batch = granted.batch_size or task.local_steps * task.spec.batch
        began, seconds = time.perf_counter(), self._times.draw(batch)
        wait_until(began + (seconds / 3 if task.overlap else seconds))
        return Computing(batch, began, seconds, time.perf_counter() - began)

    def _exchange(self, computed: Computing) -> GrantIteration:
        backward = SyntheticBackward(self._elements, computed.began, computed.seconds) if self._task.overlap else None
        return self._client.exchange(
            self._gradient.data.cast("B"),
            self._weights.data.cast("B"),
            batch_size=computed.batch,
            compute_seconds=computed.spent,
            rates=(RATE,),
            backward=backward,
        )


def difference(model: npt.NDArray[np.float32], counts: Mapping[int, int], model_bytes: float) -> str | None:
    """Compare a model with one that began at zero and received `counts[worker]` updates of each worker.

    Return the difference in words, or None if there is none. Updates have the weight 1.
    """
    elements = description(model_bytes).layout.size
    expected = np.zeros(elements)
    for number, count in counts.items():
        expected -= RATE * count * gradient_of(number, elements)
    # Each addition rounds to float32. Half an update is far larger than these rounding errors.
    wrong = int(np.count_nonzero(np.abs(model - expected) > RATE / 4))
    return f"{wrong} of {elements} elements differ from the sum of {sum(counts.values())} updates" if wrong else None
