"""Workers without torch: numpy buffers and the plain client, on a model whose final weights are known in advance.

The model is one vector. An update of samples [a, b) adds b − a to every element (SGD, learning rate 1). So at the end
every element equals the number of samples that were trained on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.model.description import Description
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.serve.environment import address
from paceline.serve.worker.client import Client

SIZE = 12


def described(size: int = SIZE, optimizer: str = "SGD") -> bytes:
    """Return the description of the model as JSON."""
    layout = Layout((Tensor("w", (size - 2,)), Tensor("b", (2,))))
    return Description(layout, OptimizerSpec(optimizer, ({"lr": 1.0},))).as_json()


def work(
    where: str, samples: int, epochs: int = 1, batch: int = 4, updates: int | None = None, **options: Any
) -> float:
    """Train until there are no more samples, or for `updates` updates. Return the last weight that was pulled."""
    weights, gradient = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    client = Client(address(where), described(), **options)
    try:
        client.begin(weights.data.cast("B"))
        while updates is None or client.granted.iteration <= updates:
            given = client.take(batch, samples, epochs)
            count = given.stop - given.start
            if not count:
                break
            gradient.fill(-count)
            client.exchange(
                gradient.data.cast("B"),
                weights.data.cast("B"),
                batch_size=count,
                compute_seconds=0.001,
                rates=(1.0,),
                taken=(given.number,),
            )
        return float(weights[0])
    finally:
        client.close()
