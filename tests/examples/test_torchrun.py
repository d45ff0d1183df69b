"""A script under the real torchrun: each process is a worker, numbered by RANK. MASTER_ADDR names the server's host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch.test_by_hand import LOCAL, Background
from launch.test_by_hand import started as started  # a fixture

pytest.importorskip("torch")
SCRIPT = """
import os, torch, paceline
from torch.utils.data import TensorDataset
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
with paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.01)) as session:
    assert session.worker == int(os.environ["RANK"]), session.worker
    for (x,) in session.batches(TensorDataset(torch.ones(64, 4)), batch_size=4, epochs=1):
        loss = model(x).square().mean()
        loss.backward()
        session.step(loss)
print("worker", session.worker, "of", session.world_size, "is done")
"""


@pytest.mark.slow
def test_two_processes_of_torchrun_are_two_workers(tmp_path: Path, started: list[Background]) -> None:
    script, token = tmp_path / "train.py", tmp_path / "job.token"
    script.write_text(SCRIPT)
    token.write_text("a-long-enough-secret\n")
    token.chmod(0o600)
    server = Background("serve", "--workers", 2, "--token-file", token)
    started.append(server)
    port = server.address().rpartition(":")[2]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    ran = subprocess.run(
        [*torchrun, "--master-port", "0", str(script)],
        env=LOCAL | {"PACELINE_CONNECT": f":{port}", "PACELINE_TOKEN_FILE": str(token)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == ["worker 0 of 2 is done", "worker 1 of 2 is done"]
    assert server.ends() == 0
