"""64 worker actors with a tiny model end cleanly, and leave nothing behind.

The test prints how long they take to start and what memory one needs. It asserts no duration: Ray imports its modules
for each actor, so the time depends on the cores.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed; `make test-ray` installs it")

from on_ray.jobs import CountingJob

pytestmark = pytest.mark.usefixtures("cluster")

WORKERS = 64
CLUSTER_CPUS = WORKERS


def memory(pid: int) -> int:
    """Return the bytes of memory of this process. Memory that processes share counts in parts."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


@pytest.mark.alone
@pytest.mark.slow
def test_64_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = CountingJob(tmp_path, workers=WORKERS, epochs=1, batch=4, policy="bsp:weights=sum", lease=60.0)
    began = time.monotonic()
    job.start()
    job.until(lambda: len(list(job.notes.iterdir())) == WORKERS, "first step of all workers", seconds=600.0)
    seconds = time.monotonic() - began
    processes = [pid for number in range(WORKERS) for pid in job.processes(number)]
    middle = sorted(memory(pid) for pid in processes)[WORKERS // 2]
    job.end()
    with capsys.disabled():
        print(  # noqa: T201
            f"\n64 workers: the first step of all after {seconds:.0f} s, {middle >> 20} MB for one worker"
        )
    for _ in range(100):
        if not any(Path(f"/proc/{pid}").exists() for pid in processes):
            break
        time.sleep(0.1)
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]
    assert ray.available_resources()["CPU"] == WORKERS
