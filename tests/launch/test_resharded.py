"""`paceline run`: a checkpoint of three shards is resumed with one, two and five."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from launch.test_by_hand import paceline
from paceline.model import checkpoint

TRAINS = """
import sys
import torch
import paceline
from paceline.model.optimizer import without_compiler

without_compiler()
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
with paceline.join(model, optimizer) as session:
    torch.save((model.state_dict(), optimizer.state_dict()["state"]), sys.argv[1] + ".first")
    for a, b in session.batches(data, batch_size=8, epochs=int(sys.argv[2])):
        loss = torch.nn.functional.cross_entropy(model(a), b)
        loss.backward()
        session.step(loss)
    session.finish()
    torch.save((model.state_dict(), optimizer.state_dict()["state"]), sys.argv[1] + ".last")
"""


def flat(path: Path) -> dict[str, bytes]:
    model, optimizer = torch.load(path, weights_only=True)
    state = {f"{number} {key}": value for number, each in optimizer.items() for key, value in each.items()}
    return {name: value.numpy().tobytes() for name, value in (model | state).items()}


@pytest.mark.slow
def test_a_job_of_three_shards_is_resumed_with_one_two_and_five(tmp_path: Path) -> None:
    script, job = tmp_path / "train.py", tmp_path / "job"
    script.write_text(TRAINS)
    common = ("run", "--workers", 1, "-p", "asp", "--checkpoint")
    ran = paceline(*common, job, "--servers", 3, script, tmp_path / "three", 1)
    assert ran.returncode == 0, ran.stderr
    found = checkpoint.read(job)
    assert (found.shards, found.version) == (3, 8)
    for shards, how in ((1, "whole"), (2, "streamed"), (5, "whole")):
        again, mark = tmp_path / f"job-{shards}", tmp_path / f"{shards}"
        options = ("--resume", found.folder, "--servers", shards, "--apply", how)
        ran = paceline(*common, again, *options, script, mark, 2)
        assert ran.returncode == 0, ran.stderr
        assert flat(Path(f"{mark}.first")) == flat(tmp_path / "three.last")
        last = checkpoint.read(again)
        assert (last.shards, last.version, last.job["samples"]["trained"]) == (shards, 16, 2 * 64)

    ran = paceline("run", "--resume", found.folder, "--servers", 200, script, tmp_path / "none", 2)
    assert ran.returncode == 1
    assert "cannot be cut again: 200 shards are too many" in ran.stderr and "use fewer --servers." in ran.stderr
    assert len(ran.stderr.splitlines()) == 1, ran.stderr
