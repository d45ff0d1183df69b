"""The example that reduces DDP's gradients by HiPS."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

EXAMPLE = Path(__file__).parents[2] / "examples/hips.py"
RUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.mark.slow
def test_it_learns_with_four_ranks() -> None:
    ran = subprocess.run([*RUN, "4", str(EXAMPLE)], capture_output=True, text=True, timeout=180, check=False)
    assert ran.returncode == 0, ran.stderr
    accuracy = re.search(r"accuracy on the digits: ([0-9.]+)%", ran.stdout)
    assert accuracy and float(accuracy[1]) > 90


@pytest.mark.slow
def test_it_says_how_many_ranks_it_wants() -> None:
    ran = subprocess.run([*RUN, "2", str(EXAMPLE)], capture_output=True, text=True, timeout=180, check=False)
    assert ran.returncode != 0
    assert "BCube(2, 1) has 4 servers, and there are 2 ranks; they must be as many." in ran.stderr
