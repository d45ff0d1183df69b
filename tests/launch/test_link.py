"""A job over emulated links, started by `paceline run`, and the comparison that it ends with."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")
pytest.importorskip("matplotlib")

from launch.test_local import paceline_run

TRAINS = """
import torch
import paceline
from paceline.model.optimizer import without_compiler

without_compiler()  # importing torch's compiler takes two seconds in each process
data = torch.utils.data.TensorDataset(torch.randn(120, 50), torch.randn(120, 50))
model = torch.nn.Linear(50, 50)  # 10,200 bytes
with paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
    for step, (x, y) in enumerate(session.batches(data, batch_size=10)):
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        session.step(loss)
        if session.is_main:
            session.log(accuracy=step / 5)
"""


@pytest.mark.slow
def test_policies_are_compared_over_emulated_links(tmp_path: Path) -> None:
    script, plot, scratch = tmp_path / "train.py", tmp_path / "curve.svg", tmp_path / "tmp"
    script.write_text(TRAINS)
    scratch.mkdir()
    ran = paceline_run(
        *("--workers", "2", "--policy", "bsp,r2sp", "--link", "2Mbit", "--target", "accuracy=0.6"),
        *("--plot", str(plot), str(script)),
        TMPDIR=str(scratch),
        COLUMNS="120",
    )
    assert ran.returncode == 0, ran.stderr
    assert "train.py with 2 workers, over 2Mbit links" in ran.stdout
    heading, _, bsp, r2sp = ran.stdout.split("links", 1)[1].splitlines()[1:5]
    assert re.match(r"policy +to 60% +accuracy +seconds ", heading)
    for row, floor in ((bsp, 6 * 4 * 10_200 / 250_000), (r2sp, 6 * 2 * 10_200 / 250_000)):
        _, reached, _, _, seconds = row.split()[:5]
        assert float(seconds) >= 0.95 * floor, "the model crosses the server's link in each direction, twice a round"
        assert 0 < float(reached) <= float(seconds)
    assert re.search(r"^r2sp reached 60% .* bsp\.$", ran.stdout, re.MULTILINE)
    assert "<!-- r2sp -->" in plot.read_text()
    assert [name for name in os.listdir(scratch) if name.startswith("paceline-link-")] == [], "it is removed"
