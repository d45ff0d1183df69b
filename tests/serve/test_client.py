"""The client over a real server."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from paceline.serve.client import Client
from paceline.serve.variables import address
from serve.workers import described
from train.jobs import job

SIZE = 3 << 18  # elements, so that a pull takes a while


def test_a_pull_is_of_one_version_on_all_shards() -> None:
    """Every update changes every element alike. What a worker sees between the others' updates must be alike too."""
    seen = []

    def run(where: str) -> None:
        weights, gradient = np.zeros(SIZE, np.float32), np.ones(SIZE, np.float32)
        client = Client(address(where), described(SIZE))
        client.begin(weights.data.cast("B"))
        for _ in range(40):
            assert np.all(weights == weights[0]), "half an update was seen"
            assert weights[0] == -client.version
            seen.append(client.version)
            client.exchange(
                gradient.data.cast("B"), weights.data.cast("B"), batch_size=1, compute_seconds=0.0, rates=(1.0,)
            )
        client.close()

    with job("asp", shards=3, workers=4) as running:
        running.work(*[run] * 4)
        running.finish()
    assert max(seen) > 100
