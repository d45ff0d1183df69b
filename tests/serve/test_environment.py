"""The variables of launchers: the number of a worker, the first host, and the token's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.serve.environment import address, first_host, job_token, worker_number, workers_of_launcher


@pytest.mark.parametrize(
    ("variables", "number", "workers"),
    [
        ({}, None, None),
        ({"RANK": "3", "WORLD_SIZE": "8"}, 3, 8),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, 2, 4),
        ({"JOB_COMPLETION_INDEX": "1"}, 1, None),
        ({"JOB_COMPLETION_INDEX": "1", "RANK": "5"}, 5, None),
        ({"PACELINE_WORKER": "0", "RANK": "5"}, 0, None),
    ],
)
def test_the_number_of_a_worker(variables: dict[str, str], number: int | None, workers: int | None) -> None:
    assert worker_number(variables) == number
    assert workers_of_launcher(variables) == workers


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("one", "one"),
        ("one,two", "one"),
        ("gpu[01-04,07],cpu1", "gpu01"),
        ("gpu[3,5]", "gpu3"),
        ("n[1-2]-ib", "n1-ib"),
        ("rack-a[001-002],b", "rack-a001"),
        ("a.cluster.org,b", "a.cluster.org"),
        ("", None),
    ],
)
def test_the_first_host_of_a_list_of_slurm(nodes: str, first: str | None) -> None:
    assert first_host({"SLURM_JOB_NODELIST": nodes}) == first


def test_an_address_without_a_host_is_on_the_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(ValueError, match="The address :7000 has no host, and neither MASTER_ADDR nor"):
        address(":7000")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[2-3]")
    assert address(":7000") == ("gpu2", 7000)
    monkeypatch.setenv("MASTER_ADDR", "main")
    assert address(":7000") == ("main", 7000), "torchrun within a task of Slurm"
    assert address("other:1") == ("other", 1)


def test_the_token_is_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(file))
    with pytest.raises(ValueError, match="cannot be read"):
        job_token()
    file.write_text("short\n")
    with pytest.raises(ValueError, match="too short to be safe"):
        job_token()
    file.write_text("a-long-enough-secret\n")
    assert job_token() == b"a-long-enough-secret"
    monkeypatch.setenv("PACELINE_TOKEN", "aa" * 16)
    assert job_token() == b"\xaa" * 16
