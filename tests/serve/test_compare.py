"""Updates are compared by the shards, and the policy is told."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from paceline.model.similarity import products
from paceline.observe.events import Applied
from paceline.policies import Apply, Update, make
from paceline.serve.client import Client
from paceline.serve.comparison import Comparison
from paceline.serve.coordinator import Terms
from paceline.serve.messages import Compared
from paceline.serve.server import Server, ServerError
from paceline.serve.variables import address
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


def test_the_parts_of_all_shards_make_the_whole() -> None:
    torch = pytest.importorskip("torch")
    gradients = [torch.from_numpy(each) for each in directions()]
    weights = (1 / WORKERS,) * WORKERS
    comparison = Comparison(Apply(tuple(Update(worker, 1, 0, 1, 0.0) for worker in range(WORKERS)), weights))
    for start, stop in ((0, 300), (300, 301), (301, SIZE)):
        part = products([each[start:stop] for each in gradients], weights)
        said = Compared(1, part.with_whole, part.with_itself, part.whole)
        assert comparison.fits(said)
        comparison.add(said)
    assert comparison.parts == 3
    for without_itself in (True, False):
        expected = products(gradients, weights).cosines(without_itself)
        assert comparison.cosines(without_itself) == pytest.approx(expected, abs=1e-5)
    assert not comparison.fits(Compared(1, (0.0,), (0.0,), 0.0))


def test_models_pushed_whole_are_refused_where_they_would_be_compared() -> None:
    with pytest.raises(ServerError, match="leave moves=model out, or say filter=false"):
        Server(lambda: make("fl-r2sp:moves=model"), Terms())
    Server(lambda: make("fl-r2sp:moves=model,filter=false"), Terms())
