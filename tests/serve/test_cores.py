"""The cores that processes of one host share."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from paceline.serve import cores


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with eight cores."""
    monkeypatch.setattr(cores, "available", lambda: 8)


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(("processes", "threads"), [(2, "4"), (3, "2"), (8, "1"), (20, "1")])
def test_processes_share_the_cores(processes: int, threads: str) -> None:
    assert cores.settings(processes, {}) == {"OMP_NUM_THREADS": threads}


@pytest.mark.usefixtures("eight")
def test_one_process_may_use_all_cores() -> None:
    assert cores.settings(1, {}) == {}


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_the_choice_of_the_user_stays(name: str) -> None:
    assert cores.settings(4, {name: "3"}) == {}
    assert cores.remote_settings(4, {name: "3"}) == "true"
    assert cores.settings(4, {name: ""}) == {"OMP_NUM_THREADS": "2"}


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(("limit", "threads"), [("", 4), ("1", 1), ("6", 4), ("3,1", 3), ("many", 4), ("0", 4)])
def test_shards_keep_to_the_limit_of_all_processes(limit: str, threads: int) -> None:
    assert cores.shared_by_shards(2, {"OMP_NUM_THREADS": limit}) == threads


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "max 100000"}, 1000),
        ({"cpu.max": "nonsense"}, 1000),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 1000),
        ({}, 1000),
    ],
)
def test_the_limit_of_a_container_counts(
    files: dict[str, str], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(1000)), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores.available(tmp_path) == most


@pytest.mark.parametrize(
    ("processes", "there", "threads"),
    [(2, {}, "3"), (9, {}, "1"), (1, {}, ""), (2, {"OMP_NUM_THREADS": "5"}, "5"), (2, {"MKL_NUM_THREADS": "5"}, "")],
)
def test_another_host_counts_its_own_cores(processes: int, there: dict[str, str], threads: str, tmp_path: Path) -> None:
    nproc = tmp_path / "nproc"
    nproc.write_text("#!/bin/sh\necho 6\n")
    nproc.chmod(0o755)
    shell = f'{cores.remote_settings(processes, {})} && printf "%s" "$OMP_NUM_THREADS"'
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **there}
    ran = subprocess.run(["sh", "-c", shell], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == threads
