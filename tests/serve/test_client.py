"""The client over a real server."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from paceline.serve.environment import address
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.messages import Pull
from paceline.serve.worker.client import Client
from paceline.serve.worker.streamed_exchange import ShardLink
from paceline.serve.worker.transfers import Transfers
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


@pytest.mark.parametrize(("expected", "then", "at_last"), [(3, 2, 0), (1, 0, 0), (0, 0, 0), (None, None, None)])
def test_when_shards_are_asked_again_fewer_versions_are_to_follow(
    expected: int | None, then: int | None, at_last: int | None
) -> None:
    """One had gone on meanwhile. Of what was to follow the version that was granted, that much has."""
    transfers = Transfers.__new__(Transfers)
    parts = transfers.parts = [ShardLink(number, Endpoint("nowhere", 1), ((0, 1),)) for number in (0, 1)]
    versions = {0: [7, 8, 11], 1: [8, 11, 11]}
    asked = []

    def pull(message: Pull, _weights: memoryview, part: ShardLink) -> None:
        asked.append(message)
        part.version = versions[part.number].pop(0)

    transfers._pull = pull  # type: ignore[assignment,method-assign]
    transfers._on_all = lambda do: [do(part) for part in parts]  # type: ignore[method-assign]
    assert transfers.pull(7, memoryview(b""), expected) == 11
    assert asked[::2] == asked[1::2] == [Pull(7, expected), Pull(8, then), Pull(11, at_last)]
