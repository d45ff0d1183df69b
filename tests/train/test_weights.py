"""A real job applies the mean of its workers' updates: the learning rate of one process can stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from paceline.serve.job_options import JobOptions
from paceline.train.session import join
from paceline.workloads.data import load
from train.jobs import job

WORKERS = 4


def learner(data: Any) -> Callable[[str], float]:
    """Return a worker that trains with SGD of rate 0.3 and momentum, and returns its accuracy."""
    torch.manual_seed(0)
    mine = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    training = torch.utils.data.TensorDataset(data.inputs / 255, data.labels)

    def run(address: str) -> float:
        with join(mine, torch.optim.SGD(mine.parameters(), lr=0.3, momentum=0.9), connect=address) as session:
            for x, y in session.batches(training, 32, 6):
                loss = torch.nn.functional.cross_entropy(mine(x), y)
                loss.backward()
                session.step(loss)
        with torch.no_grad():
            return float((mine(data.test_inputs / 255).argmax(1) == data.test_labels).float().mean())

    return run


def accuracy(policy: str) -> float:
    data = load("digits")
    with job(policy, workers=WORKERS) as running:
        return float(running.work(*(learner(data) for _ in range(WORKERS)))[0])


def test_a_plain_policy_name_keeps_the_learning_rate_of_one_process() -> None:
    """The accuracy depends on the timing of the workers. It was between 94 and 96% in ten runs."""
    assert accuracy(JobOptions(policy="r2sp", workers=WORKERS).policy) > 0.9


@pytest.mark.parametrize(("policy", "least", "most"), [("r2sp", 0.6, 1.0), ("r2sp:weights=sum", 2.4, 2.4)])
def test_full_updates_are_asked_for_and_multiply_the_rate(policy: str, least: float, most: float) -> None:
    """Every gradient is 1 and there are 24 updates, so the movement of the weight shows their rates.

    A mean is over the workers that have joined, so it counts the first updates for more than a quarter.
    """
    ones = torch.utils.data.TensorDataset(torch.ones(128, 1))

    def learner() -> Callable[[str], float]:
        mine = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(mine.weight)

        def run(address: str) -> float:
            with join(mine, torch.optim.SGD(mine.parameters(), lr=0.1), connect=address) as session:
                for (x,) in session.batches(ones, 32, 6):
                    loss = mine(x).mean()
                    loss.backward()
                    session.step(loss)
            return float(mine.weight.item())

        return run

    with job(JobOptions(policy=policy, workers=WORKERS).policy, workers=WORKERS) as running:
        (weight, *others) = running.work(*(learner() for _ in range(WORKERS)))
    assert least - 1e-6 <= -weight <= most + 1e-6
    assert others == [weight] * (WORKERS - 1)
