"""The shards compare the updates of a round, and the policy leaves out a worker whose updates differ too much."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from paceline.model.similarity import products
from paceline.observe.trace import Applied
from paceline.policies import Apply, Update, make
from paceline.serve.coordinator.comparison import Comparison
from paceline.serve.coordinator.config import ServerConfig
from paceline.serve.environment import address
from paceline.serve.server import Server
from paceline.serve.watch import inspect
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.messages import UpdateProducts
from paceline.serve.worker.client import Client
from serve.workers import described
from train.jobs import job

SIZE, WORKERS, OUTLIER, ROUNDS = 1000, 6, 4, 9


def directions() -> np.ndarray[Any, Any]:
    """Return a gradient for each worker: a common direction with noise, and the opposite direction for the outlier."""
    random = np.random.default_rng(0)
    common = random.normal(size=SIZE)
    own = common + 0.5 * random.normal(size=(WORKERS, SIZE))
    own[OUTLIER] = -common
    return own.astype(np.float32)


@pytest.mark.parametrize("shards", [1, 3])
def test_an_outlier_is_left_out(shards: int) -> None:
    """It gets no grant until the other workers have left. Then the policy has nobody else, and grants it again."""
    gradients = directions()
    blacklisted: dict[int, tuple[float, ...]] = {}
    over = threading.Event()

    with job("filtered:policy=(bsp:weights=mean)", shards=shards, workers=WORKERS) as running:
        policy: Any = running.coordinator.ledger.policy

        def note() -> None:
            blacklisted.update(policy.blacklist)
            over.set()

        done = threading.Barrier(WORKERS - 1, note)

        def run(where: str, worker: int) -> None:
            weights, gradient = np.zeros(SIZE, np.float32), gradients[worker]
            client = Client(address(where), described(SIZE), worker=worker)
            client.begin(weights.data.cast("B"))
            rounds = 0
            while not over.is_set() if worker == OUTLIER else rounds < ROUNDS:
                rounds += 1
                client.exchange(
                    gradient.data.cast("B"), weights.data.cast("B"), batch_size=1, compute_seconds=0.0, rates=(1.0,)
                )
            if worker != OUTLIER:
                done.wait(30)
            client.close()

        running.work(*[lambda where, worker=worker: run(where, worker) for worker in range(WORKERS)])
        running.finish()
    assert list(blacklisted) == [OUTLIER]
    assert all(cosine < -0.5 for cosine in blacklisted[OUTLIER])
    applied = [event for event in running.events if isinstance(event, Applied)]
    assert all((OUTLIER in event.workers) == (event.version <= 5) for event in applied[:ROUNDS])


def test_an_excluded_worker_is_told_why_and_can_be_pardoned(caplog: pytest.LogCaptureFixture) -> None:
    """An observer sees who is excluded and why. After a pardon the worker is granted again."""
    gradients, pardoned = directions(), threading.Event()

    with job("filtered:policy=(bsp:weights=mean)", workers=WORKERS, token=b"secret") as running:
        endpoint = Endpoint(*address(running.address), token=b"secret")

        def run(where: str, worker: int) -> None:
            weights, gradient = np.zeros(SIZE, np.float32), gradients[worker]
            client = Client(address(where), described(SIZE), b"secret", worker)
            client.begin(weights.data.cast("B"))
            rounds = 0
            while rounds < 6 or not pardoned.is_set():
                rounds += 1
                client.exchange(gradient.data.cast("B"), weights.data.cast("B"), batch_size=1, rates=(1.0,))
                if worker == OUTLIER and client.granted.iteration > 6:
                    break
            client.close()

        def pardon() -> None:
            for _ in range(400):
                found = asyncio.run(inspect(endpoint))
                if found.blacklist:
                    break
                time.sleep(0.05)
            assert found.filters and not found.pardoned
            ((client, cosines),) = found.blacklist
            assert client == OUTLIER and all(cosine < -0.5 for cosine in cosines)
            found = asyncio.run(inspect(endpoint, [OUTLIER, 77]))
            assert found.pardoned == (OUTLIER,) and not found.blacklist
            pardoned.set()

        pardoning = threading.Thread(target=pardon)
        pardoning.start()
        running.work(*[lambda where, worker=worker: run(where, worker) for worker in range(WORKERS)])
        pardoning.join(30)
        running.finish()
    assert pardoned.is_set()
    (warning,) = [record.message for record in caplog.records if "left out" in record.message]
    assert warning.startswith(f"Worker {OUTLIER} is left out: its updates have little in common")


def test_a_blacklisted_worker_is_told_why_when_it_joins_and_when_it_reconnects() -> None:
    with job("filtered:policy=(bsp:weights=mean)", workers=2) as running:
        running.coordinator.ledger.policy.recall({"blacklist": {"1": [0.1, 0.2]}})
        included, excluded = (Client(address(running.address), described(SIZE), worker=worker) for worker in range(2))
        included.begin(memoryview(bytearray(4 * SIZE)))
        assert included.pull_seconds > 0
        wait_until_excluded(excluded)
        assert "(cosines 0.10, 0.20)" in excluded._incarnation.exclusion and not included._incarnation.exclusion
        excluded._incarnation._state.exclusion = ""  # as if the message had been lost with the connection
        excluded._incarnation._control.cut()
        wait_until_excluded(excluded)
        excluded.close()
        included.close()
        running.finish()


def wait_until_excluded(client: Client) -> None:
    end = time.monotonic() + 20
    while not client._incarnation.exclusion:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_policy_that_excludes_nobody_says_so() -> None:
    with job("bsp") as running:
        found = asyncio.run(inspect(Endpoint(*address(running.address)), everyone=True))
    assert not found.filters and not found.blacklist and not found.pardoned


def test_an_observer_without_the_token_cannot_pardon() -> None:
    with (
        job("fl-r2sp:groups=1", token=b"secret") as running,
        pytest.raises(ConnectionError, match="token is wrong"),
    ):
        asyncio.run(inspect(Endpoint(*address(running.address), token=b"guess"), everyone=True))


def test_the_products_of_all_shards_add_up_to_those_of_the_whole_updates() -> None:
    torch = pytest.importorskip("torch")
    gradients = [torch.from_numpy(each) for each in directions()]
    weights = (1 / WORKERS,) * WORKERS
    comparison = Comparison(Apply(tuple(Update(worker, 1, 0, 1, 0.0) for worker in range(WORKERS)), weights))
    for shard, (start, stop) in enumerate(((0, 300), (300, 301), (301, SIZE))):
        part = products([each[start:stop] for each in gradients], weights)
        message = UpdateProducts(1, part.with_whole, part.with_itself, part.whole)
        assert comparison.fits(message)
        comparison.add(shard, message)
        comparison.add(shard, message)  # its backup sends the same
    assert comparison.shards == {0, 1, 2}
    assert comparison.cosines() == pytest.approx(products(gradients, weights).cosines(), abs=1e-5)
    assert not comparison.fits(UpdateProducts(1, (0.0,), (0.0,), 0.0))


@pytest.mark.parametrize(
    ("policy", "shards", "rounds"),
    [
        ("fl-r2sp:groups=1,fraction=1,moves=model", 1, 5),
        ("fl-r2sp:groups=1,fraction=1,moves=model", 3, 5),
        ("fl-r2sp:groups=2,fraction=1,as_printed=true", 2, 3),
    ],
)
def test_models_are_compared_by_their_difference_to_what_the_workers_pulled(
    policy: str, shards: int, rounds: int
) -> None:
    """The models are large, and the differences small. So the models themselves are nearly parallel."""
    Server(lambda: make(policy), ServerConfig())  # it is not refused
    changes = directions()
    blacklisted: dict[int, tuple[float, ...]] = {}
    over = threading.Event()

    with job(policy, shards=shards, workers=WORKERS) as running:
        made: Any = running.coordinator.ledger.policy

        def note() -> None:
            blacklisted.update(made.blacklist)
            over.set()

        done = threading.Barrier(WORKERS - 1, note)

        def run(where: str, worker: int) -> None:
            weights = np.full(SIZE, 1000, np.float32)
            client = Client(address(where), described(SIZE), worker=worker)
            client.begin(weights.data.cast("B"))
            count = 0
            while not over.is_set() if worker == OUTLIER else count < ROUNDS:
                count += 1
                model = weights + changes[worker]
                client.exchange(model.data.cast("B"), weights.data.cast("B"), batch_size=1, rates=(1.0,))
            if worker != OUTLIER:
                done.wait(30)
            client.close()

        running.work(*[lambda where, worker=worker: run(where, worker) for worker in range(WORKERS)])
        running.finish()
    assert list(blacklisted) == [OUTLIER]
    assert len(blacklisted[OUTLIER]) == rounds
    assert all(cosine < -0.3 for cosine in blacklisted[OUTLIER])
