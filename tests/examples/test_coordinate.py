"""The example that paces plain torch.distributed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")
pytest.importorskip("sklearn")

EXAMPLE = Path(__file__).parents[2] / "examples/coordinate.py"


@pytest.mark.slow
def test_it_learns_alone_and_paced() -> None:
    paced = [sys.executable, "-m", "paceline", "run", "--servers", "0", "--workers", "2", "-p", "r2sp", str(EXAMPLE)]
    for command in ([sys.executable, str(EXAMPLE)], paced):
        ran = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        assert ran.returncode == 0, ran.stderr
        accuracy = re.search(r"accuracy on the digits: ([0-9.]+)%", ran.stdout)
        assert accuracy and float(accuracy[1]) > 80
