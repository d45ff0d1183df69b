"""Training over a real server gives the same result as one process, and keeps the policy's promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

import paceline
from paceline.model.description import Description
from paceline.model.optimizer import spec_of
from paceline.observe.trace import Measured
from paceline.policies.asp import ASP
from paceline.train.flat_model import FlatModel
from paceline.train.session import Session, join
from train.jobs import job
from train.lessons import OPTIMIZERS, check_equals_one_process, check_trains, data, loss_on, model


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("shards", [1, 3])
def test_bsp_by_the_mean_equals_one_process_on_the_joint_batch(optimizer: str, shards: int) -> None:
    check_equals_one_process("bsp:weights=mean", optimizer, shards)


@pytest.mark.parametrize("policy", ["bsp", "asp", "ssp", "dssp", "r2sp", "r2sp:groups=2", "ksync:k=2", "kbatch:k=2"])
def test_every_policy_trains(policy: str) -> None:
    check_trains(policy, shards=2)


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


@pytest.mark.parametrize("function", [paceline.join, paceline.wrap])
def test_swapped_arguments_are_refused_with_the_right_order(function: Any) -> None:
    mine = model()
    with pytest.raises(
        ValueError, match=rf"^The model comes first.*: paceline\.{function.__name__}\(model, optimizer\)\.$"
    ):
        function(torch.optim.SGD(mine.parameters(), lr=0.1), mine)


def test_a_worker_with_another_model_is_refused() -> None:
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
        join(mine, torch.optim.SGD(mine.parameters(), lr=0.1), connect=running.address, token="a guess of a token")


def test_a_token_that_could_be_guessed_is_refused() -> None:
    mine = model()
    with pytest.raises(ValueError, match="The token in the argument token is too short to be safe"):
        join(mine, torch.optim.SGD(mine.parameters(), lr=0.1), connect="127.0.0.1:1", token="guess")


@pytest.mark.parametrize("policy", ["bsp", "bsp:weights=mean"])
def test_a_barrier_gives_all_workers_the_mean_of_the_running_statistics(policy: str) -> None:
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


# Metrics, and the main process


class Listening(ASP):
    """A policy that records the metrics it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[tuple[str, object, float]] = []

    def measured(self, kind: str, subject: object, value: float, now: float) -> Any:
        self.received.append((kind, subject, value))
        return super().measured(kind, subject, value, now)


def test_metrics_reach_the_policy_and_the_trace_and_one_worker_is_the_main_process() -> None:
    def run(address: str) -> tuple[int, bool]:
        mine = model()
        with join(mine, torch.optim.SGD(mine.parameters(), lr=0.1), connect=address) as session:
            session.log(accuracy=torch.tensor(0.5, requires_grad=True) + session.worker, val_loss=session.worker)
            session.finish()
            session.log(accuracy=0.75)  # of the final model
            return session.worker, session.is_main

    policy = Listening()
    with job(policy, workers=3) as running:
        found = running.work(*[run] * 3)
        running.finish()
    assert sorted(found) == [(0, True), (1, False), (2, False)]
    for worker in range(3):
        expected = [("accuracy", 0.5 + worker), ("val_loss", float(worker)), ("accuracy", 0.75)]
        assert [(kind, value) for kind, subject, value in policy.received if subject == worker] == expected
        traced = [event for event in running.events if isinstance(event, Measured) and event.worker == worker]
        assert [(event.kind, event.value) for event in traced] == expected


def test_alone_the_process_is_the_main_one_and_metrics_go_nowhere() -> None:
    mine = model()
    with join(mine, torch.optim.SGD(mine.parameters(), lr=0.1)) as session:
        assert session.is_main
        session.log()
        session.log(accuracy=0.5)
    session.log(accuracy=0.5)


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        ({"accuracy": float("nan")}, "The metric accuracy must be a finite number; got nan."),
        ({"loss": torch.tensor(float("inf"))}, "The metric loss must be a finite number; got inf."),
        ({"loss": 10**400}, "The metric loss must be a number; got a value of type int."),
        ({"accuracy": "0.5"}, "The metric accuracy must be a number; got a value of type str."),
        ({"accuracy": None}, "The metric accuracy must be a number; got a value of type NoneType."),
        ({"accuracy": torch.ones(2)}, "The metric accuracy must be a number; got a value of type Tensor."),
        ({"top 5": 0.5}, "A metric's name has letters, digits and underscores, at most 80 of them; got 'top 5'."),
        ({"": 0.5}, "A metric's name has letters, digits and underscores, at most 80 of them; got ''."),
        ({"a" * 81: 0.5}, "at most 80 of them; got 'aaa"),
    ],
    ids=str,
)
def test_a_wrong_metric_is_refused_in_one_sentence_and_nothing_is_sent(metrics: dict[str, Any], sentence: str) -> None:
    mine, policy = model(), Listening()
    with (
        job(policy) as running,
        join(mine, torch.optim.SGD(mine.parameters(), lr=0.1), connect=running.address) as session,
    ):
        with pytest.raises(ValueError, match=r"^.+$") as caught:
            session.log(good=1.0, **metrics)
        assert sentence in str(caught.value)
    assert policy.received == []


def test_a_metric_that_comes_too_late_is_not_lost_in_silence() -> None:
    mine = model()
    with job("asp") as running:
        with join(mine, torch.optim.SGD(mine.parameters(), lr=0.1), connect=running.address) as session:
            pass
        with pytest.warns(UserWarning, match="has left the job, so accuracy cannot be reported"):
            session.log(accuracy=0.5)


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


def test_a_job_without_servers_refuses_a_training_script() -> None:
    """It would train nothing, and end as if all had gone well."""
    mine = model()
    with job("bsp", shards=0) as running:
        with pytest.raises(
            ConnectionError, match=r"^This job has no server for the model \(--servers 0\), so it cannot"
        ):
            join(mine, torch.optim.SGD(mine.parameters(), lr=0.1), connect=running.address)
        running.finish()
