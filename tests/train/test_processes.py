"""Processes that torch.distributed would connect although paceline does."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from paceline.serve.environment import LAUNCHED, RANKS, RUN, WORK, WORKER, WORKERS
from paceline.train.processes import check_process, expected_rank, expected_world_size


def test_a_launcher_inside_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(1, 1)
    for name, value in (("TORCHELASTIC_RUN_ID", "1"), ("WORLD_SIZE", "2"), (LAUNCHED, RUN)):
        check_process(model)
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"started 2 processes inside this worker.*`paceline run --workers 2 SCRIPT`"):
        check_process(model)
    monkeypatch.setenv(LAUNCHED, WORK)  # torchrun may start the workers of a server
    check_process(model)


def test_a_model_that_reduces_its_gradients_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
    with pytest.raises(ValueError, match="join the job with the model itself"):
        check_process(model)


def test_the_rank_and_the_size_that_the_environment_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (expected_rank(), expected_world_size()) == (0, 1)
    for name, value in ((WORKER, "3"), (WORKERS, "5"), (RANKS, "2"), ("PACELINE_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert (expected_rank(), expected_world_size()) == (7, 10)
