"""The optimizer's settings are the same in all workers of a job, except for the learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

import paceline
from paceline.model import checkpoint
from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan
from train.jobs import job


def joined(address: str, **settings: Any) -> Any:
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(net.weight)
    return paceline.join(net, torch.optim.SGD(net.parameters(), **{"lr": 0.5, **settings}), connect=address)


def step_without_gradient(session: Any) -> float:
    """Make a step that only the weight decay can change, and return the weight."""
    (0.0 * session.model.weight).sum().backward()
    session.step()
    return float(session.model.weight.detach())


@pytest.mark.parametrize(
    ("name", "value", "other"), [("momentum", 0.9, 0.5), ("weight_decay", 0.0, 0.1), ("nesterov", True, False)]
)
def test_a_worker_with_another_setting_is_refused_by_name(name: str, value: Any, other: Any) -> None:
    shared = {"momentum": 0.9}
    with job("asp") as running, joined(running.address, **{**shared, name: value}) as session:
        with pytest.raises(ConnectionError, match=f"SGD's {name} is {value} here and {other} there"):
            joined(running.address, **{**shared, name: other})
        step_without_gradient(session)  # the first worker notices nothing


def test_learning_rates_may_differ_and_a_scheduler_may_have_come_before() -> None:
    def scheduled(address: str, rate: float) -> None:
        net = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # adds initial_lr to the groups
        paceline.join(net, optimizer, connect=address).close()

    with job("asp", workers=2) as running:
        running.work(lambda address: scheduled(address, 0.1), lambda address: scheduled(address, 0.2))
        running.finish()


def test_workers_that_make_their_own_steps_may_have_their_own_settings() -> None:
    with job("fl-r2sp:groups=1,moves=model,filter=false", workers=2) as running:
        running.work(lambda a: joined(a, momentum=0.9).close(), lambda a: joined(a, momentum=0.5).close())
        running.finish()


def test_a_resumed_job_keeps_its_settings_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with job("asp", saving=CheckpointPlan(tmp_path, updates=1)) as running:
        with joined(running.address, weight_decay=1.0) as session:
            assert step_without_gradient(session) == pytest.approx(0.5)
        running.finish()
    found = checkpoint.read(tmp_path)
    with job("asp", restored=found) as running, joined(running.address, weight_decay=0.0) as session:
        assert "SGD's weight_decay is 1.0 here and 0.0 there, in the worker's script" in caplog.text
        assert step_without_gradient(session) == pytest.approx(0.25), "the checkpoint's weight decay counts"
        with pytest.raises(ConnectionError, match=r"SGD's weight_decay is 0\.0 here and 1\.0 there"):
            joined(running.address, weight_decay=1.0)
