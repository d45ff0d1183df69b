"""A worker that computes nothing: it waits as long as computing would take, and then moves real bytes.

Its gradient is made once; it is really sent, really applied, and the weights that come back are really received. So
what is measured is all that a training step has besides its computation. And since a worker's gradient is always the
same, the last model tells how many of each worker's updates are in it (`differs`).
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
from paceline.simulate.cluster_spec import WorkerSpec, chance_of

RATE = 1e-3  # the learning rate


@dataclass(frozen=True)
class SyntheticTask:
    """What a worker is to do."""

    address: tuple[str, int]
    token: bytes
    number: int
    spec: WorkerSpec
    model_bytes: float
    seed: int = 0
    overlap: bool = False  # push the gradient while it comes out
    iterations: int | None = None  # None: until the job is over


class SyntheticBackward:
    """The last two thirds of computing, in which the gradient comes out evenly, from its end to its beginning."""

    def __init__(self, elements: int, began: float, seconds: float) -> None:
        self._elements, self._began, self._seconds = elements, began, seconds

    def wait(self, start: int) -> None:
        done = 1 - start / self._elements
        wait_until(self._began + self._seconds * (1 + 2 * done) / 3)

    def outcome(self) -> tuple[float, float | None]:
        return self._seconds, None


def description(model_bytes: float) -> Description:
    """A model of so many bytes, trained by plain SGD."""
    elements = max(1, round(model_bytes / 4))
    return Description(Layout((Tensor("model", (elements,)),)), OptimizerSpec("SGD", ({"lr": RATE},)))


def gradient_of(number: int, elements: int) -> npt.NDArray[np.float32]:
    """A worker's gradient, in every iteration."""
    return np.random.default_rng(number).standard_normal(elements, dtype=np.float32)


def wait_until(moment: float) -> None:
    """Until this moment of `time.perf_counter`."""
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


def work(task: SyntheticTask, pipe: Connection) -> None:
    """Take part. If the number of iterations is given, the last model goes into the pipe."""
    described = description(task.model_bytes)
    elements = described.layout.size
    gradient, weights = gradient_of(task.number, elements), np.zeros(elements, np.float32)
    chance, spec = chance_of(task.number, task.seed), task.spec
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


def differs(model: npt.NDArray[np.float32], counts: Mapping[int, int], model_bytes: float) -> str | None:
    """One sentence if a model is not what so many updates of each worker, of weight 1, make of one that was zero."""
    elements = description(model_bytes).layout.size
    expected = np.zeros(elements)
    for number, count in counts.items():
        expected -= RATE * count * gradient_of(number, elements)
    # Each update is rounded to float32 when it is added; half of one is far more than that.
    wrong = int(np.count_nonzero(np.abs(model - expected) > RATE / 4))
    return f"{wrong} of {elements} elements are other than {sum(counts.values())} updates make them" if wrong else None
