"""Training over a real server: the same as one process, and by the policy's promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from paceline.model.description import Description
from paceline.model.optimizer import spec_of
from paceline.train.flat_model import FlatModel
from paceline.train.session import Session, join
from train.jobs import job
from train.lessons import OPTIMIZERS, data, is_one_process, loss_on, model, trains


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("shards", [1, 3])
def test_bsp_by_the_mean_is_one_process_on_the_joint_batch(optimizer: str, shards: int) -> None:
    is_one_process("bsp:weights=mean", optimizer, shards)


@pytest.mark.parametrize("policy", ["bsp", "asp", "ssp", "dssp", "r2sp", "r2sp:groups=2", "ksync:k=2", "kbatch:k=2"])
def test_every_policy_trains(policy: str) -> None:
    trains(policy, shards=2)


def test_the_same_script_trains_alone() -> None:
    x, y = data(64)
    mine = model()
    session = join(mine, torch.optim.SGD(mine.parameters(), lr=0.1))
    assert isinstance(session, Session)
    before = loss_on(mine, x, y)
    with session:
        for inputs, targets in session.batches(torch.utils.data.TensorDataset(x, y), batch_size=16, epochs=5):
            loss = torch.nn.functional.cross_entropy(mine(inputs), targets)
            loss.backward()
            session.step(loss)
    assert loss_on(mine, x, y) < before


def test_workers_with_different_models_are_told_so() -> None:
    def other(address: str) -> None:
        mine = torch.nn.Linear(6, 4)
        join(mine, torch.optim.SGD(mine.parameters(), lr=0.1), connect=address).close()

    with job("asp") as running:
        mine = model()
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        with join(mine, optimizer, connect=running.address), pytest.raises(ConnectionError, match="same model"):
            running.work(other)


def test_a_wrong_token_is_refused() -> None:
    mine = model()
    with job("asp", token=b"secret") as running, pytest.raises(ConnectionError, match="token is wrong"):
        join(mine, torch.optim.SGD(mine.parameters(), lr=0.1), connect=running.address, token="guess")


@pytest.mark.parametrize("policy", ["bsp", "bsp:weights=mean"])
def test_a_barrier_gives_everybody_the_mean_of_the_running_statistics(policy: str) -> None:
    parts = [torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)) + 3 * seed for seed in range(2)]

    def worker(part: Any) -> Callable[[str], Any]:
        mine = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))

        def run(address: str) -> Any:
            with join(mine, torch.optim.SGD(mine.parameters(), lr=0.1), connect=address) as session:
                mine(part).mean().backward()
                session.step(batch_size=8)
                return mine[0].state_dict()

        return run

    with job(policy, shards=2, workers=2) as running:
        results = running.work(*(worker(part) for part in parts))
    means = torch.stack([0.1 * part.mean(0) for part in parts]).mean(0)
    variances = torch.stack([0.9 + 0.1 * part.var(0) for part in parts]).mean(0)
    for result in results:
        torch.testing.assert_close(result["running_mean"], means)
        torch.testing.assert_close(result["running_var"], variances)
        assert result["num_batches_tracked"].item() == 1


def test_frozen_parameters_that_differ_are_found() -> None:
    def described(seed: int) -> Description:
        torch.manual_seed(seed)
        mine = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3))
        mine[0].requires_grad_(False)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        flat = FlatModel(mine, optimizer)
        return Description(flat.layout, spec_of(optimizer), flat.fixed)

    assert described(0).differs_from(described(0)) is None
    assert "frozen" in str(described(0).differs_from(described(1)))
