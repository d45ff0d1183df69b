"""A small model to train over a server, and checks of the result: equal to one process, or at least a lower loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from paceline.observe.observer import replay
from paceline.observe.summary import Summary
from paceline.observe.trace import Applied, Granted
from paceline.train.session import join
from train.jobs import Job, job

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def data(samples: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 6, generator=generator), torch.randint(0, 3, (samples,), generator=generator)


def loss_on(trained: Any, x: Any, y: Any) -> float:
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(trained(x), y))


def weights(trained: Any) -> Any:
    return torch.cat([parameter.detach().flatten() for parameter in trained.parameters()])


def batches_of(worker: int, count: int) -> list[tuple[Any, Any]]:
    """Return batches of four samples. Those of the next worker begin four samples later."""
    x, y = data(96)
    return [(x[start : start + 4], y[start : start + 4]) for start in range(worker * 4, worker * 4 + 4 * count, 4)]


def steps_of(trained: Any, optimizer: Any, batches: list[tuple[Any, Any]]) -> None:
    """Train in plain torch."""
    for x, y in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(trained(x), y).backward()
        optimizer.step()


def alone(optimizer: str, x: Any, y: Any, steps: int) -> Any:
    """Return the weights after `steps` steps of plain torch on all samples."""
    mine = model()
    plain = OPTIMIZERS[optimizer](mine.parameters())
    for _ in range(steps):
        torch.nn.functional.cross_entropy(mine(x), y).backward()
        plain.step()
        plain.zero_grad()
    return weights(mine)


def student(optimizer: str, x: Any, y: Any, steps: int, overlap: bool = False) -> Callable[[str], Any]:
    """Return a worker that makes `steps` steps on these samples and returns its weights."""
    mine = model()  # not created in the thread, because all threads share torch's random numbers

    def run(address: str) -> Any:
        with join(mine, OPTIMIZERS[optimizer](mine.parameters()), connect=address, overlap=overlap) as session:
            session.optimizer.batch_size = len(x)
            for _ in range(steps):
                loss = torch.nn.functional.cross_entropy(mine(x), y)
                loss.backward()
                session.step(loss)
            return weights(mine)

    return run


def check_equals_one_process(
    policy: str, optimizer: str, shards: int, check: Callable[[Job], None] = lambda _: None, overlap: bool = False
) -> None:
    """Compare ten rounds of three workers with unequal batches with plain torch on all their samples."""
    x, y = data(24)
    parts = (slice(0, 12), slice(12, 20), slice(20, 24))
    with job(policy, shards, workers=3) as running:
        results = running.work(*(student(optimizer, x[part], y[part], 10, overlap) for part in parts))
        check(running)
    expected = alone(optimizer, x, y, 10)
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def check_trains(policy: str, shards: int, streamed: bool = False, overlap: bool = False) -> None:
    """Let four workers share a small dataset for four epochs. Every sample is trained on, and the loss goes down."""
    x, y = data(96)
    dataset = torch.utils.data.TensorDataset(x, y)

    def run(address: str) -> Any:
        mine = model()
        with join(mine, torch.optim.SGD(mine.parameters(), lr=0.05), connect=address, overlap=overlap) as session:
            for inputs, targets in session.batches(dataset, batch_size=8, epochs=4):
                loss = torch.nn.functional.cross_entropy(mine(inputs), targets)
                loss.backward()
                session.step(loss)
        return loss_on(mine, x, y)

    with job(policy, shards=shards, workers=4, streamed=streamed) as running:
        losses = running.work(*[run] * 4)
        running.finish()
        assert running.coordinator.apply == ("streamed" if streamed else "whole")
        assert running.coordinator.samples is not None
        assert running.coordinator.samples.all_done
    assert min(losses) < loss_on(model(), x, y)
    versions = [event.version for event in running.events if isinstance(event, Applied)]
    assert versions == list(range(1, len(versions) + 1))
    summary = Summary()
    replay(running.events, summary)
    report = summary.report()
    if policy == "r2sp":
        assert report.max_staleness <= 3
    if policy.startswith("bsp"):
        assert report.max_progress_gap == 0
    assert any(isinstance(event, Granted) for event in running.events)
