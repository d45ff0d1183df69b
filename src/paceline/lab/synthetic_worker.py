"""A synthetic worker: it waits for as long as computing would take, and then moves real bytes.

It makes its gradient once. Each iteration sends the gradient, the server applies it, and the worker receives the new
weights. So a run measures everything in a training step but the computation. A worker's gradient is always the same, so
the last model shows how many updates of each worker it contains (`difference`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from paceline.model.description import Description
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.serve.worker.client import Client
from paceline.simulate.cluster_spec import WorkerSpec, worker_rng

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


def description(model_bytes: float) -> Description:
    """Return the description of a model of this size, trained by plain SGD."""
    elements = max(1, round(model_bytes / 4))
    return Description(Layout((Tensor("model", (elements,)),)), OptimizerSpec("SGD", ({"lr": RATE},)))


def gradient_of(number: int, elements: int) -> npt.NDArray[np.float32]:
    """Return the gradient of a worker, which is the same in every iteration."""
    return np.random.default_rng(number).standard_normal(elements, dtype=np.float32)


def wait_until(moment: float) -> None:
    """Wait until this time of `time.perf_counter`."""
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


def work(task: SyntheticTask, pipe: Connection) -> None:
    """Take part in a job. If the number of iterations is given, send the model after the last one through the pipe."""
    described = description(task.model_bytes)
    elements = described.layout.size
    gradient, weights = gradient_of(task.number, elements), np.zeros(elements, np.float32)
    chance, spec = worker_rng(task.number, task.seed), task.spec
    client = Client(task.address, described.as_json(), task.token, task.number)
    granted = client.begin(weights.data.cast("B"))
    done = 0
    while done != task.iterations:
        batch = granted.batch_size or spec.batch
        began, seconds = time.perf_counter(), spec.draw(batch, chance)
        wait_until(began + (seconds / 3 if task.overlap else seconds))
        granted = client.exchange(
            gradient.data.cast("B"),
            weights.data.cast("B"),
            batch_size=batch,
            compute_seconds=time.perf_counter() - began,
            rates=(RATE,),
            backward=SyntheticBackward(elements, began, seconds) if task.overlap else None,
        )
        done += 1
    while not client.finish(weights.data.cast("B")):
        pass
    pipe.send(weights)
    client.close()


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
