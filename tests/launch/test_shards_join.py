"""Shards that join a server from other machines, here from other processes of this one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from launch.test_by_hand import Background, paceline, refused, started  # noqa: F401 (a fixture)
from launch.test_local import TRAINS
from launch.test_secure import fake_ssh, fingerprint_of, role_file, token  # noqa: F401 (fixtures)
from paceline.model import checkpoint


@pytest.mark.slow
def test_shards_and_workers_join_a_server_over_tls(
    tmp_path: Path,
    token: Path,  # noqa: F811
    started: list[Background],  # noqa: F811
) -> None:
    """Every party has a token of its role. A shard too many, a number that is taken and a wrong token are refused."""
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    serve = ("serve", "--servers", 2, "--shards-join", "--host", "0.0.0.0", "--tls", "auto", "--token-file", token)
    started.append(server := Background(*serve))
    where, fingerprint = fingerprint_of(server)
    where = where.replace("0.0.0.0", "127.0.0.1")
    join = ("shard", "--join", where, "--tls", fingerprint, "--token-file")
    shard_token, worker_token = role_file(tmp_path, "shard", token), role_file(tmp_path, "worker", token)
    refused(paceline(*join, worker_token), "only for the role worker")
    refused(paceline("shard", "--join", "elsewhere:7000", "--token-file", shard_token), "give --tls sha256:…")
    refused(paceline(*join, shard_token, "--number", 2), "There is no shard 2 in this job: it has 2", 1)
    shards = [Background(*join, shard_token, "--number", 1), Background(*join, shard_token)]
    started += shards
    other = tmp_path / "other"
    other.write_text("another secret of another operator")
    other.chmod(0o600)
    refused(paceline(*join, other), "Shard is refused: The job's token is wrong", 1)
    worker = ("work", "--connect", where, "--tls", fingerprint, "--token-file", worker_token, script, tmp_path / "mark")
    started.append(working := Background(*worker, SLEEP="0.2"))
    time.sleep(1)
    assert [each.process.poll() for each in shards] == [None, None], [each.lines for each in shards]
    refused(paceline(*join, shard_token), "All 2 shards of this job are there", 1)
    refused(paceline(*join, shard_token, "--number", 1), "There is a shard 1 already", 1)
    assert [each.ends() for each in (working, server, *shards)] == [0, 0, 0, 0], [each.lines for each in started]
    assert any("updates    120" in line for line in server.lines)


@pytest.mark.slow
def test_a_shard_that_is_lost_is_replaced_from_the_checkpoint(
    tmp_path: Path,
    started: list[Background],  # noqa: F811
) -> None:
    """The machine of a shard is gone, with the command that kept the shard. Another machine takes its place."""
    script, job = tmp_path / "train.py", tmp_path / "job"
    script.write_text(TRAINS)
    serve = ("serve", "--servers", 2, "--shards-join", "--checkpoint", job, "--checkpoint-every", 20)
    started.append(server := Background(*serve))
    join = ("shard", "--join", server.address())
    started += (shards := [Background(*join) for _ in range(2)])
    started.append(working := Background("work", "--connect", server.address(), script, tmp_path / "mark", SLEEP="0.1"))
    until = time.monotonic() + 60
    while not (found := checkpoint.newest(job, quick=True)) or found.version < 20:
        assert time.monotonic() < until, [each.lines for each in started]
        time.sleep(0.1)
    _kill_with_children(shards[0].process.pid)
    started.append(another := Background(*join))
    assert [each.ends() for each in (working, server, shards[1], another)] == [0, 0, 0, 0], [
        each.lines for each in started
    ]
    assert any("Going back to version" in line for line in server.lines)
    found = checkpoint.read(job)
    assert (found.version, found.job["samples"]["trained"], found.job["samples"]["open"]) == (120, 4 * 240, [])


@pytest.mark.slow
def test_run_starts_shards_on_the_hosts_of_servers(tmp_path: Path, fake_ssh: dict[str, str]) -> None:  # noqa: F811
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    hosts = ("--hosts", "one,two", "--server-hosts", "three,four", "--host", "127.0.0.1", "--tls", "auto")
    ran = paceline("run", "--workers", 2, *hosts, script, tmp_path / "mark", **fake_ssh)
    assert ran.returncode == 0, ran.stderr
    assert "updates    120" in ran.stdout
    words = (tmp_path / "words").read_text().splitlines()
    assert {"one", "two", "three", "four"} <= set(words)
    assert sum("paceline.serve.shard" in word for word in words) == 2, "one shard on each host of a server"


@pytest.mark.slow
def test_contradictions_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    refused(paceline("serve", "--shards-join", "--colocate"), "leave it or --shards-join out")
    refused(paceline("serve", "--shards-join", "--servers", 0), "leave it or --shards-join out")
    refused(paceline("serve", "--shards-join", "--replicas", 1), "--replicas with --shards-join needs `paceline run`")
    refused(paceline("run", "--server-hosts", "a", "--colocate", script), "leave it or --server-hosts out")
    refused(paceline("run", "--server-hosts", "a", "--servers", 0, script), "leave it or --server-hosts out")
    refused(paceline("shard", "--join", "nowhere"), "A server's address is written host:port")


def _kill_with_children(pid: int) -> None:
    """Kill a command and the process that it has started, which has its own session."""
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    for each in (pid, *children):
        os.kill(each, signal.SIGKILL)
