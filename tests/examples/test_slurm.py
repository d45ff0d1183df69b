"""examples/schedulers/slurm.sbatch, run without Slurm: small scripts stand in for `srun`, `squeue` and `scontrol`."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.test_by_hand import LOCAL, _descendants, alive
from paceline.model import checkpoint

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "schedulers" / "slurm.sbatch"
#: Starts SLURM_NTASKS processes, as srun does. Its exit code is the highest one. SIGTERM to it kills them.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
pids=()
trap 'kill -KILL "${pids[@]}"' TERM
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_STEP_ID=0 "$@" &
    pids+=($!)
done
echo "${pids[@]}" > "$STAND_IN/tasks"
highest=0
for pid in "${pids[@]}"; do
    while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
    wait "$pid"
    code=$?
    ((code > highest)) && highest=$code
done
exit "$highest"
"""
COMMANDS = {
    "srun": SRUN,
    "squeue": '#!/bin/sh\ncat "$STAND_IN/state"\n',
    "scontrol": '#!/bin/sh\necho "$@" >> "$STAND_IN/scontrol"\n',
    "paceline": f'#!/bin/sh\nexec {sys.executable} -m paceline "$@"\n',
}


class Slurm:
    """Runs the batch script as job 7 with two tasks on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs, self.restarts = folder, folder / "runs", 0
        commands = folder / "bin"
        commands.mkdir()
        for name, text in COMMANDS.items():
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        (folder / "state").write_text("RUNNING\n")
        self._path = f"{commands}:{os.environ['PATH']}"
        self.running: subprocess.Popen[str] | None = None

    def start(self, *arguments: str, **more: str) -> None:
        variables = {
            "SLURM_JOB_ID": "7",
            "SLURM_NTASKS": "2",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_RESTART_COUNT": str(self.restarts),
            "PACELINE_FOLDER": str(self.runs),
            "STAND_IN": str(self.folder),
            "PATH": self._path,
        }
        known = {name: value for name, value in LOCAL.items() if name != "MASTER_ADDR"}
        self.running = subprocess.Popen(
            ["bash", str(SCRIPT), *arguments],
            cwd=ROOT,
            env=known | variables | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.restarts += 1

    def ends(self, seconds: float = 120.0) -> tuple[int, str]:
        """Wait for the batch script. Return its exit code and its output."""
        assert self.running is not None
        printed, _ = self.running.communicate(timeout=seconds)
        return self.running.returncode, printed

    def process(self, words: str) -> int:
        """Return the id of the first process of the job whose command line has these words."""
        assert self.running is not None
        for pid in _descendants(self.running.pid):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if words in command and "bash" not in command:
                return pid
        raise AssertionError(f"no process runs {words!r}")

    def wait_for_checkpoint(self, version: int) -> None:
        """Wait until a checkpoint of this version or a newer one is written."""
        end = time.monotonic() + 90
        while self.version() < version:
            assert time.monotonic() < end
            time.sleep(0.05)

    def version(self) -> int:
        """Return the version of the newest checkpoint, or -1."""
        newest = checkpoint.newest(self.runs / "checkpoints", quick=True)
        return newest.version if newest else -1

    def requeued(self) -> bool:
        return (self.folder / "scontrol").exists()


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    cluster = Slurm(tmp_path)
    yield cluster
    if cluster.running and cluster.running.poll() is None:
        for pid in [*_descendants(cluster.running.pid), cluster.running.pid]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        cluster.running.communicate()


@pytest.mark.slow
def test_the_batch_script_trains_the_digits(slurm: Slurm) -> None:
    slurm.start("examples/digits.py", "--epochs", "1")
    code, printed = slurm.ends()
    assert code == 0, printed
    assert "accuracy on the test set" in printed
    assert slurm.version() > 0
    assert not slurm.requeued()
    for name in ("job.token", "worker.token", "job.pem"):
        assert stat.S_IMODE((slurm.runs / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(slurm.runs.stat().st_mode) == 0o700


@pytest.mark.slow
def test_a_job_whose_server_was_killed_is_queued_again_and_continues(slurm: Slurm) -> None:
    slurm.start("examples/digits.py", "--epochs", "2", PACELINE_EVERY="5")
    slurm.wait_for_checkpoint(5)
    os.kill(slurm.process("-m paceline serve"), signal.SIGKILL)
    code, printed = slurm.ends()
    assert code == 128 + signal.SIGKILL, printed
    assert (slurm.folder / "scontrol").read_text() == "requeue 7\n"
    before, token = slurm.version(), (slurm.runs / "job.token").read_text()
    slurm.start("examples/digits.py", "--epochs", "2", PACELINE_EVERY="5")
    code, printed = slurm.ends()
    assert code == 0, printed
    assert "accuracy on the test set" in printed
    assert slurm.version() > before
    assert (slurm.runs / "job.token").read_text() == token
    trained = checkpoint.read(slurm.runs / "checkpoints").job["samples"]
    assert trained["trained"] == 2 * trained["size"], "each sample counts once an epoch, in both runs together"


@pytest.mark.slow
@pytest.mark.parametrize("state", ["RUNNING", "CANCELLED"])
def test_workers_that_are_asked_to_leave_end_the_job_with_a_checkpoint(state: str, slurm: Slurm) -> None:
    """Slurm signals the tasks before the time limit, and when the job is cancelled. Only the first is queued again."""
    slurm.start("examples/digits.py", "--epochs", "1000", PACELINE_EVERY="5")
    slurm.wait_for_checkpoint(5)
    (slurm.folder / "state").write_text(f"{state}\n")
    for pid in (slurm.folder / "tasks").read_text().split():
        os.kill(int(pid), signal.SIGTERM)
    code, printed = slurm.ends()
    assert code == 143, printed
    assert slurm.requeued() == (state == "RUNNING")
    assert checkpoint.read(slurm.runs / "checkpoints").version > 5, "one is written at the end"


@pytest.mark.slow
def test_a_server_that_cannot_start_ends_the_job_with_its_sentence(slurm: Slurm) -> None:
    slurm.start("examples/digits.py", PACELINE_POLICY="nonsense")
    code, printed = slurm.ends()
    assert code == 2, printed
    assert "nonsense" in printed and "Traceback" not in printed
    assert not slurm.requeued()
