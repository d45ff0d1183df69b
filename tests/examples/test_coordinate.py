"""The example that coordinates exchanges of torch.distributed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

EXAMPLE = Path(__file__).parents[2] / "examples/coordinate.py"
ALONE = [sys.executable, str(EXAMPLE)]
PACED = [sys.executable, "-m", "paceline", "run", "--servers", "0", "--workers", "2", "-p", "r2sp", str(EXAMPLE)]


@pytest.mark.slow
@pytest.mark.parametrize("command", [PACED, pytest.param(ALONE, marks=pytest.mark.matrix)], ids=["paced", "alone"])
def test_it_learns_alone_and_coordinated(command: list[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert ran.returncode == 0, ran.stderr
    accuracy = re.search(r"accuracy on the test set: ([0-9.]+)%", ran.stdout)
    assert accuracy and float(accuracy[1]) > 80
