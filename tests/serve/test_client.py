"""The client against a real server."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from paceline.job.samples import Samples
from paceline.serve.environment import address
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.messages import Pull
from paceline.serve.worker.client import Client
from paceline.serve.worker.shard_link import ShardLink
from paceline.serve.worker.transfers import Transfers
from serve.workers import described
from train.jobs import job

SIZE = 3 << 18  # elements: large, so that a pull takes a while


def test_a_pull_has_one_version_on_all_shards() -> None:
    """Every update changes all elements alike, so a worker must see all elements alike, whatever others apply."""
    seen = []

    def run(where: str) -> None:
        weights, gradient = np.zeros(SIZE, np.float32), np.ones(SIZE, np.float32)
        client = Client(address(where), described(SIZE))
        client.begin(weights.data.cast("B"))
        for _ in range(40):
            assert np.all(weights == weights[0]), "the pull holds half an update"
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


def test_the_main_worker_tells_a_restored_server_again_that_training_has_ended() -> None:
    """The server's checkpoint is older than the end, so the server would hand out samples again."""
    empty = memoryview(b"")
    with job("asp", shards=0) as running:
        client = Client(address(running.address), b"")
        client.begin(empty)
        samples = client.take(4, 8, 3)
        client.end_samples(8)
        assert samples.stop == 4 and client.take(4, 8, 3).stop == 0
        state = running.coordinator.state
        assert state.samples
        state.samples = Samples.from_json(state.samples.as_json())
        state.config = replace(state.config, generation="a later one")
        running.coordinator._listener._generation = "a later one"
        client._incarnation._control.cut()
        assert not client.finish(empty)
        assert client.finish(empty)
        assert state.samples.take(1, 1, 4) is None
        client.close()
        running.finish()


@pytest.mark.parametrize(("expected", "second", "last"), [(3, 2, 0), (1, 0, 0), (0, 0, 0), (None, None, None)])
def test_a_repeated_pull_expects_fewer_versions(expected: int | None, second: int | None, last: int | None) -> None:
    """A shard applied updates between the pulls, so fewer versions remain until the worker's own update."""
    transfers = Transfers.__new__(Transfers)
    shards = transfers.parts = [ShardLink(number, Endpoint("nowhere", 1), ((0, 1),)) for number in (0, 1)]
    versions = {0: [7, 8, 11], 1: [8, 11, 11]}
    requests = []

    def pull(request: Pull, _weights: memoryview, shard: ShardLink) -> None:
        requests.append(request)
        shard.version = versions[shard.number].pop(0)

    transfers._pull = pull  # type: ignore[assignment,method-assign]
    transfers._on_all_shards = lambda do: [do(shard) for shard in shards]  # type: ignore[assignment,method-assign]
    assert transfers.pull(7, memoryview(b""), expected) == 11
    assert requests[::2] == requests[1::2] == [Pull(7, expected), Pull(8, second), Pull(11, last)]
