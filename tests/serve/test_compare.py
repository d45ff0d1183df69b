"""Updates are compared by the shards, and the policy is told."""

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
from paceline.serve.server import Server, ServerError
from paceline.serve.watch import inspect
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.messages import UpdateProducts
from paceline.serve.worker.client import Client
from serve.workers import described
from train.jobs import job

SIZE, WORKERS, ODD, ROUNDS = 1000, 6, 4, 9


def directions() -> np.ndarray[Any, Any]:
    """One that most share, with some noise of each one's own; the odd one's is another."""
    random = np.random.default_rng(0)
    common = random.normal(size=SIZE)
    own = common + 0.5 * random.normal(size=(WORKERS, SIZE))
    own[ODD] = -common
    return own.astype(np.float32)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_worker_that_pulls_the_other_way_is_left_out(shards: int) -> None:
    """It hears nothing more until the others have left; then it is better than nobody."""
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
            while not over.is_set() if worker == ODD else rounds < ROUNDS:
                rounds += 1
                client.exchange(
                    gradient.data.cast("B"), weights.data.cast("B"), batch_size=1, compute_seconds=0.0, rates=(1.0,)
                )
            if worker != ODD:
                done.wait(30)
            client.close()

        running.work(*[lambda where, worker=worker: run(where, worker) for worker in range(WORKERS)])
        running.finish()
    assert list(blacklisted) == [ODD]
    assert all(cosine < -0.5 for cosine in blacklisted[ODD])
    applied = [event for event in running.events if isinstance(event, Applied)]
    assert all((ODD in event.workers) == (event.version <= 5) for event in applied[:ROUNDS])


def test_who_is_left_out_is_told_and_can_be_taken_back(caplog: pytest.LogCaptureFixture) -> None:
    """From outside: who it is and why, and a pardon, after which it is granted again."""
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
                if worker == ODD and client.granted.iteration > 6:
                    break
            client.close()

        def judge() -> None:
            for _ in range(400):
                found = asyncio.run(inspect(endpoint))
                if found.blacklist:
                    break
                time.sleep(0.05)
            assert found.filters and not found.pardoned
            ((client, cosines),) = found.blacklist
            assert client == ODD and all(cosine < -0.5 for cosine in cosines)
            found = asyncio.run(inspect(endpoint, [ODD, 77]))
            assert found.pardoned == (ODD,) and not found.blacklist
            pardoned.set()

        judging = threading.Thread(target=judge)
        judging.start()
        running.work(*[lambda where, worker=worker: run(where, worker) for worker in range(WORKERS)])
        judging.join(30)
        running.finish()
    assert pardoned.is_set()
    (said,) = [record.message for record in caplog.records if "left out" in record.message]
    assert said.startswith(f"Worker {ODD} is left out: its updates have little in common")


def test_who_comes_back_blacklisted_is_told_again_and_also_on_a_new_connection() -> None:
    with job("filtered:policy=(bsp:weights=mean)", workers=2) as running:
        running.coordinator.ledger.policy.recall({"blacklist": {"1": [0.1, 0.2]}})
        here, exclusion = (Client(address(running.address), described(SIZE), worker=worker) for worker in range(2))
        here.begin(memoryview(bytearray(4 * SIZE)))
        assert here.pull_seconds > 0
        told(exclusion)
        assert "(cosines 0.10, 0.20)" in exclusion._incarnation.exclusion and not here._incarnation.exclusion
        exclusion._incarnation._state.exclusion = ""  # as if it had been lost with the connection
        exclusion._incarnation._control.cut()
        told(exclusion)
        exclusion.close()
        here.close()
        running.finish()


def told(client: Client) -> None:
    end = time.monotonic() + 20
    while not client._incarnation.exclusion:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_where_nobody_is_left_out_it_is_said() -> None:
    with job("bsp") as running:
        found = asyncio.run(inspect(Endpoint(*address(running.address)), everyone=True))
    assert not found.filters and not found.blacklist and not found.pardoned


def test_a_stranger_may_not_pardon() -> None:
    with (
        job("fl-r2sp:groups=1", token=b"secret") as running,
        pytest.raises(ConnectionError, match="token is wrong"),
    ):
        asyncio.run(inspect(Endpoint(*address(running.address), token=b"guess"), everyone=True))


def test_the_parts_of_all_shards_make_the_whole() -> None:
    torch = pytest.importorskip("torch")
    gradients = [torch.from_numpy(each) for each in directions()]
    weights = (1 / WORKERS,) * WORKERS
    comparison = Comparison(Apply(tuple(Update(worker, 1, 0, 1, 0.0) for worker in range(WORKERS)), weights))
    for start, stop in ((0, 300), (300, 301), (301, SIZE)):
        part = products([each[start:stop] for each in gradients], weights)
        said = UpdateProducts(1, part.with_whole, part.with_itself, part.whole)
        assert comparison.fits(said)
        comparison.add(said)
    assert comparison.parts == 3
    assert comparison.cosines() == pytest.approx(products(gradients, weights).cosines(), abs=1e-5)
    assert not comparison.fits(UpdateProducts(1, (0.0,), (0.0,), 0.0))


def test_models_pushed_whole_are_refused_where_they_would_be_compared() -> None:
    with pytest.raises(ServerError, match="leave moves=model out, or say filter=false"):
        Server(lambda: make("fl-r2sp:moves=model"), ServerConfig())
    Server(lambda: make("fl-r2sp:moves=model,filter=false"), ServerConfig())
