"""A model with numbers that are not finite: good checkpoints are kept, and the server does not wait for space."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from paceline.model import checkpoint
from paceline.model.description import Description
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan
from paceline.serve.environment import address
from paceline.serve.job_options import JobOptions
from paceline.serve.last_save import LastSave
from paceline.serve.serve_job import ServedJob, unsaved
from paceline.serve.worker.client import Client
from train.jobs import job

#: Each step multiplies the weights by -1e12, so after four of them they are infinite.
GROWS = OptimizerSpec("SGD", ({"lr": 1e6, "weight_decay": 1e6},))
DESCRIPTION = Description(Layout((Tensor("w", (8,)),)), GROWS).as_json()


def grow(where: str, steps: int, is_enough: Callable[[], bool] = lambda: True) -> None:
    """Make steps that let the weights grow: so many, and then more until it is enough."""
    weights, gradient = np.ones(8, dtype=np.float32), np.ones(8, dtype=np.float32)
    client = Client(address(where), DESCRIPTION)
    client.begin(weights.data.cast("B"))
    for _ in range(steps):
        client.exchange(gradient.data.cast("B"), weights.data.cast("B"), batch_size=1, rates=(1e6,))
    deadline = time.monotonic() + 60
    while not is_enough():
        assert time.monotonic() < deadline
        client.exchange(gradient.data.cast("B"), weights.data.cast("B"), batch_size=1, rates=(1e6,))
    client.close()


def test_checkpoints_from_before_the_weights_were_spoiled_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    plan = CheckpointPlan(folder, updates=1)
    with job("asp", shards=2, saving=plan) as running:

        def is_spoiled() -> bool:
            saved = running.coordinator.state.checkpoints
            return saved is not None and saved.is_spoiled

        # A step takes a millisecond. On a slow disk the first checkpoint may still be written after many of them.
        grow(running.address, 12, is_spoiled)
    found = checkpoint.read(folder)
    assert np.isfinite(checkpoint.weights(found)["w"]).all()
    assert 0 <= found.version <= 3
    told = unsaved(JobOptions(policy="asp", saving=plan), ServedJob(True, 12, is_saved=False, is_spoiled=True))
    assert told.startswith("The model of version 12 holds numbers that are not finite; lower the learning rate")
    assert f"continue from version {found.version} with --resume {folder}" in told


def test_the_server_does_not_wait_for_space_that_would_not_help() -> None:
    async def fail() -> bool:
        return False

    async def run() -> bool:
        checkpoints = SimpleNamespace(error="the model holds a NaN", is_spoiled=True)
        state = SimpleNamespace(checkpoints=checkpoints)
        coordinator: Any = SimpleNamespace(save=fail, state=state, failed=asyncio.Event())
        return await asyncio.wait_for(LastSave(patience=600.0).run(coordinator), 5.0)

    assert asyncio.run(run()) is False
