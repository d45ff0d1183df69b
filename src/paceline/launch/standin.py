"""A worker that computes nothing: it waits as long as computing would take, and then moves real bytes.

Its gradient is made once; it is really sent, really applied, and the weights that come back are really received. So
what is measured is all that a training step has besides its computation.
"""

from __future__ import annotations

import time

import numpy as np

from paceline.model.layout import Layout, Tensor
from paceline.model.spec import OptimizerSpec
from paceline.serve.client import Client
from paceline.serve.description import Description
from paceline.simulate.spec import WorkerSpec, chance_of

RATE = 1e-3  # the learning rate


def description(model_bytes: float) -> Description:
    """A model of so many bytes, trained by plain SGD."""
    elements = max(1, round(model_bytes / 4))
    return Description(Layout((Tensor("model", (elements,)),)), OptimizerSpec("SGD", ({"lr": RATE},)))


def wait_until(moment: float) -> None:
    """Until this moment of `time.perf_counter`."""
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


class Backward:
    """The last two thirds of computing, in which the gradient comes out evenly, from its end to its beginning."""

    def __init__(self, elements: int, began: float, seconds: float) -> None:
        self._elements, self._began, self._seconds = elements, began, seconds

    def wait(self, start: int) -> None:
        done = 1 - start / self._elements
        wait_until(self._began + self._seconds * (1 + 2 * done) / 3)

    def outcome(self) -> tuple[float, float | None]:
        return self._seconds, None


def work(
    address: tuple[str, int],
    token: bytes,
    number: int,
    spec: WorkerSpec,
    model_bytes: float,
    seed: int = 0,
    overlap: bool = False,
) -> None:
    """Take part until the job is over. overlap: push the gradient while it comes out."""
    described = description(model_bytes)
    gradient = np.random.default_rng(number).standard_normal(described.layout.size, dtype=np.float32)
    weights = np.zeros_like(gradient)
    chance = chance_of(number, seed)
    client = Client(address, described.as_json(), token, number)
    granted = client.begin(weights.data.cast("B"))
    while True:
        batch = granted.batch_size or spec.batch
        began, seconds = time.perf_counter(), spec.draw(batch, chance)
        wait_until(began + (seconds / 3 if overlap else seconds))
        granted = client.exchange(
            gradient.data.cast("B"),
            weights.data.cast("B"),
            batch_size=batch,
            compute_seconds=time.perf_counter() - began,
            rates=(RATE,),
            backward=Backward(described.layout.size, began, seconds) if overlap else None,
        )
