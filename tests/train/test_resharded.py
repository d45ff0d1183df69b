"""A job of three shards goes on with one, two or five, whole or streamed: the same model and the same optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import paceline
from paceline.model import checkpoint
from paceline.serve import replay
from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan
from train.jobs import Job, job

pytestmark = pytest.mark.filterwarnings("ignore:The batches of this loop")
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}
State = dict[str, bytes]


def train(running: Job, optimizer: str, steps: int) -> tuple[State, State]:
    """Train for some steps. Return the model and the optimizer's state before the first and after the last one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 3))
    inner = OPTIMIZERS[optimizer](model.parameters())
    x, y = torch.randn(16, 6), torch.randint(3, (16,))
    paced = paceline.wrap(model, inner, connect=running.address)

    def state() -> State:
        kept = inner.state_dict()["state"].items()
        values = {f"{number} {key}": value for number, each in kept for key, value in each.items()}
        return {name: torch.as_tensor(value).numpy().tobytes() for name, value in (values | model.state_dict()).items()}

    before = state()
    for _ in range(steps):
        torch.nn.functional.cross_entropy(model(x), y).backward()
        inner.step()
        inner.zero_grad()
    paced.finish()
    after = state()
    paced.close()
    return before, after


@pytest.mark.parametrize("how", ["whole", "streamed", "whole then streamed", "streamed then whole"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_bit_changes_with_another_number_of_shards(
    optimizer: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.model.description.MIN_PIECE_ELEMENTS", 1)
    streamed, then_streamed = how.startswith("streamed"), how.endswith("streamed")
    with job("asp", 3, saving=CheckpointPlan(tmp_path, updates=1000), streamed=streamed, slices=9) as running:
        _, trained = train(running, optimizer, 3)
    found = checkpoint.read(tmp_path)
    assert (found.shards, found.version) == (3, 3)
    assert {"0 step", "0 momentum_buffer"} & trained.keys() and "1.running_mean" in trained
    for shards in (1, 2, 5):
        with job("asp", shards, restored=found, streamed=then_streamed, slices=7) as running:
            resumed, after = train(running, optimizer, 1)
        assert resumed == trained
        assert after != trained


def test_a_recording_begins_from_the_state_that_was_cut_again(tmp_path: Path) -> None:
    with job("asp", 3, saving=CheckpointPlan(tmp_path / "job", updates=1000)) as running:
        train(running, "Adam", 3)
    with job("asp", 2, restored=checkpoint.read(tmp_path / "job"), record=tmp_path / "record") as running:
        train(running, "Adam", 2)
    parts = list(replay.weights(tmp_path / "record"))
    assert len(parts) == 2 and all(part.same for part in parts)
