"""`--correct` end to end: workers train on predicted weights, and all of them end with the model itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from launch.test_by_hand import paceline

TRAINS = """
import os, sys
import torch
import paceline
from paceline.model.optimizer import without_compiler

without_compiler()  # importing torch's compiler takes two seconds in each process
torch.manual_seed(0)
x, y = torch.randn(180, 6), torch.randint(0, 3, (180,))
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
optimizer = getattr(torch.optim, os.environ.get("OPTIMIZER", "SGD"))(model.parameters(), lr=0.05, momentum=0.9)
with paceline.join(model, optimizer) as session:
    for a, b in session.batches(torch.utils.data.TensorDataset(x, y), batch_size=6, epochs=2):
        loss = torch.nn.functional.cross_entropy(model(a), b)
        loss.backward()
        session.step(loss)
torch.save(model.state_dict(), f"{sys.argv[1]}/worker-{session.worker}.pt")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAINS)
    return path


def loaded(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("correct", "apply"),
    [("full", "whole"), pytest.param("auto", "streamed", marks=pytest.mark.matrix)],
    ids=lambda value: value,
)
def test_every_worker_ends_with_the_exported_model(correct: str, apply: str, tmp_path: Path, script: Path) -> None:
    options: list[object] = ["--workers", 2, "--servers", 2, "-p", "r2sp:weights=mean"]
    options += ["--correct", correct, "--apply", apply]
    options += ["--record-updates", tmp_path / "record"] if apply == "whole" else []
    ran = paceline("run", *options, "--checkpoint", tmp_path / "job", script, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert paceline("export", tmp_path / "job", tmp_path / "model.pt").returncode == 0
    exported = loaded(tmp_path / "model.pt")
    for number in range(2):
        mine = loaded(tmp_path / f"worker-{number}.pt")
        assert mine.keys() == exported.keys()
        assert all(torch.equal(mine[name], exported[name]) for name in mine), "a worker ended with predicted weights"
    if apply == "whole":
        replayed = paceline("replay", tmp_path / "record")
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        assert replayed.stdout.count("the same, bit for bit") == 2


@pytest.mark.matrix
@pytest.mark.slow
def test_an_optimizer_that_cannot_be_corrected_ends_the_job_with_one_sentence(tmp_path: Path, script: Path) -> None:
    common = ("run", "--workers", 2, "-p", "r2sp", "--restarts", 0)
    refused = paceline(*common, "--correct", "full", script, tmp_path, OPTIMIZER="RMSprop")
    assert refused.returncode == 1
    assert len(set(refused.stderr.splitlines())) == 1, refused.stderr
    assert "--correct full cannot be had" in refused.stderr
    assert "that of RMSprop is not known; leave it at auto." in refused.stderr
    ran = paceline(*common, script, tmp_path, OPTIMIZER="RMSprop")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "serve"])
def test_a_wrong_correction_is_answered_with_the_valid_ones(command: str, script: Path) -> None:
    ran = paceline(command, "--correct", "ful", *([script] if command == "run" else []))
    assert ran.returncode == 2
    assert ran.stderr == "--correct must be auto, none, predict, round or full, not 'ful'.\n"
    assert not ran.stdout


@pytest.mark.slow
def test_a_correction_without_effect_gives_a_note(script: Path, tmp_path: Path) -> None:
    ran = paceline("serve", "-p", "safa", "--correct", "full", "--resume", tmp_path / "none")
    assert ran.returncode == 2
    assert ran.stderr.startswith("Note: --correct has no effect, since workers make their own steps under safa.")
