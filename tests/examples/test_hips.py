"""The example that reduces the gradients of DDP with HiPS."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLE = Path(__file__).parents[2] / "examples/hips.py"
RUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.mark.matrix
@pytest.mark.slow
def test_it_learns_with_four_ranks() -> None:
    ran = subprocess.run([*RUN, "4", str(EXAMPLE)], capture_output=True, text=True, timeout=180, check=False)
    assert ran.returncode == 0, ran.stderr
    accuracy = re.search(r"accuracy on the test set: ([0-9.]+)%", ran.stdout)
    assert accuracy and float(accuracy[1]) > 90


@pytest.mark.matrix
@pytest.mark.slow
def test_a_wrong_number_of_ranks_is_an_error() -> None:
    """One process shows it, started with the variables that torchrun sets."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command, environment = [sys.executable, str(EXAMPLE)], os.environ | alone
    ran = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=environment)
    assert ran.returncode != 0
    assert "BCube(2, 1) has 4 servers, but there are 1 ranks; the two numbers must be equal." in ran.stderr
