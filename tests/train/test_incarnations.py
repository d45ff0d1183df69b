"""A worker that is given up during training continues as a new incarnation, and every sample still counts once."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.job import events
from paceline.observe.trace import Arrived
from train.jobs import Job, job

SAMPLES, EPOCHS, BATCH = 24, 2, 4


def give_up(running: Job, worker: int = 0) -> None:
    """Give up the worker, as if its lease had expired."""
    coordinator, done = running.coordinator, threading.Event()

    def expel() -> None:
        coordinator.state.roster.training[worker].heard = -math.inf
        coordinator.tell(events.TimePassed(coordinator.now))
        done.set()

    coordinator._loop.call_soon_threadsafe(expel)
    assert done.wait(10.0)


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("when", ["before the step", "after the step"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_sample_counts_once(when: str, accumulated: int, dtype: str) -> None:
    net = torch.nn.Linear(1, 1).to(getattr(torch, dtype))
    batches = 0
    with job("asp") as running:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with paceline.join(net, optimizer, connect=running.address) as session:
            loader = session.loader(DataLoader(TensorDataset(torch.arange(float(SAMPLES))), BATCH, shuffle=True))
            for _ in range(EPOCHS):
                for (x,) in loader:
                    batches += 1
                    if when == "before the step" and batches in (2, 7):
                        give_up(running)
                    net(x.unsqueeze(1).to(net.weight.dtype)).sum().backward()
                    if batches % accumulated == 0:
                        session.step()
                    if when == "after the step" and batches in (2, 7):
                        give_up(running)
            if session.optimizer.pending:  # discarded batches may leave an odd one over
                session.step()
        running.finish()
        samples: Any = running.coordinator.samples
        assert samples.all_done and samples.trained == SAMPLES * EPOCHS
        counted = [event.batch_size for event in running.events if isinstance(event, Arrived)]
    assert sum(counted) == SAMPLES * EPOCHS
