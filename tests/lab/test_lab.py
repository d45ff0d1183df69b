"""The lab: the rate is the rate, links are shared evenly, nothing is left behind, and what runs in it is real."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("pyroute2")

from typer.testing import CliRunner

from lab.labs import built
from paceline.cli import app
from paceline.lab import namespaces as labs
from paceline.lab import run, synthetic_worker
from paceline.lab.hosts import goodput, hosts
from paceline.lab.namespaces import Lab, LabError, sweep
from paceline.observe.driver import Fault
from paceline.observe.trace import Applied
from paceline.simulate.cluster_spec import ClusterSpec, WorkerSpec

RATE = 5e6


@pytest.fixture
def pair() -> Iterator[Lab]:
    with Lab({"a": RATE, "b": RATE, "c": RATE}) as lab:
        yield lab


def cluster(workers: int = 3, servers: int = 1, faults: tuple[Fault, ...] = (), lease: float = 30.0) -> ClusterSpec:
    """A model of 100 kB, sent in 20 ms and computed in 30."""
    worker = WorkerSpec(RATE, 8, 8 / 0.03)
    return ClusterSpec("small", 1e5, servers, RATE, 0.0, 10e9, lease, (worker,) * workers, faults=faults)


# The network


def namespaces() -> set[str]:
    return {name for name in os.listdir("/run/netns") if name.startswith(f"paceline-{os.getpid()}-")}


@built
@pytest.mark.alone
def test_a_stream_reaches_the_rate_and_no_more(pair: Lab) -> None:
    assert 0.93 < goodput(pair) < 1.01


def take(pipe: Connection, peers: int, seconds: float) -> None:
    """Count what comes from each peer within some seconds, from when all are there."""
    with socket.create_server(("0.0.0.0", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        found = [listener.accept()[0] for _ in range(peers)]
    counts = dict.fromkeys((peer.getpeername()[0] for peer in found), 0)
    for peer in found:
        peer.setblocking(False)
        peer.send(b".")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for peer in found:
            try:
                counts[peer.getpeername()[0]] += len(peer.recv(1 << 16))
            except BlockingIOError:
                time.sleep(1e-4)
    pipe.send(counts)


def pour(host: str, port: int) -> None:
    with socket.create_connection((host, port)) as peer:
        peer.recv(1)
        while True:
            peer.sendall(bytes(1 << 16))


@built
@pytest.mark.alone
def test_two_who_send_to_one_share_its_link_evenly(pair: Lab) -> None:
    ours, theirs = pair.pipe()
    pair.start("c", take, theirs, 2, 1.5)
    port = ours.recv()
    for host in ("a", "b"):
        pair.start(host, pour, pair.address("c"), port)
    shares = np.array(list(ours.recv().values())) / (1.5 * RATE)
    assert 0.9 < shares.sum() < 1.02
    assert abs(shares[0] - shares[1]) < 0.05


def echo(pipe: Connection) -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        peer, _ = listener.accept()
        while data := peer.recv(100):
            peer.sendall(data)


def talk(host: str, port: int, pipe: Connection) -> None:
    with socket.create_connection((host, port)) as peer:
        while True:
            peer.sendall(pipe.recv())
            peer.settimeout(pipe.recv())
            try:
                pipe.send(peer.recv(100))
            except TimeoutError:
                pipe.send(None)


@built
def test_nothing_gets_through_a_cut_link_and_all_of_it_when_it_is_mended(pair: Lab) -> None:
    ours, theirs = pair.pipe()
    pair.start("b", echo, theirs)
    port = ours.recv()
    told, tells = pair.pipe()
    pair.start("a", talk, pair.address("b"), port, tells)

    def say(word: bytes, seconds: float) -> bytes | None:
        told.send(word)
        told.send(seconds)
        heard: bytes | None = told.recv()
        return heard

    assert say(b"one", 5.0) == b"one"
    pair.cut("b")
    assert say(b"two", 0.5) is None
    pair.mend("b")
    assert say(b"", 10.0) == b"two"


@built
@pytest.mark.alone
def test_nothing_is_left_behind_and_two_labs_do_not_mind_each_other() -> None:
    with Lab({"a": RATE}) as one, Lab({"a": RATE, "b": RATE}) as other:
        assert one.namespace("a") != other.namespace("a")
        assert len(namespaces()) == 5
        sleeper = one.start("a", time.sleep, 100)
        assert 0.9 < goodput(other) < 1.01
    assert not namespaces()
    assert sleeper.exitcode is not None


@built
@pytest.mark.alone
def test_what_a_killed_process_has_left_is_found_and_removed() -> None:
    script = (
        "import time; from paceline.lab.namespaces import Lab\n"
        "if __name__ == '__main__':\n"
        "    lab = Lab({'a': 1e6}).__enter__(); lab.start('a', time.sleep, 60); print('up', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == b"up\n"
    left = {name for name in os.listdir("/run/netns") if name.startswith(f"paceline-{process.pid}-")}
    assert len(left) == 2
    sweep()
    assert left <= set(os.listdir("/run/netns")), "its process is alive"
    process.kill()
    process.wait()
    process.stdout.close()
    assert sweep() == [next(iter(left)).rpartition("-")[0]]
    assert not left & set(os.listdir("/run/netns"))


def test_without_root_or_elsewhere_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match=r"^A lab needs root.*sudo.*\.$"):
        Lab({"a": 1.0})
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LabError, match=r"^A lab is made of Linux network namespaces.*\.$"):
        Lab({"a": 1.0})


@built
def test_a_host_that_is_not_there_and_one_that_fails_are_named(pair: Lab) -> None:
    with pytest.raises(LabError, match="There is no host 'd' in this lab; there are a, b, c"):
        pair.address("d")
    with pytest.raises(LabError, match=r"What ran on a failed: ValueError: math domain error"):
        import math

        pair.call("a", math.sqrt, -1.0)
    with pytest.raises(LabError, match="What ran on b ended with exit code 3"):
        pair.call("b", os._exit, 3)


# The real server in it


@built
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "streamed", "colocate"),
    [
        ("bsp", False, False),
        ("r2sp", False, False),
        ("bsp:pipeline=true", False, False),
        ("r2sp", True, False),
        ("r2sp", True, True),
        ("asp", True, True),
    ],
)
def test_the_last_model_is_what_was_applied(policy: str, streamed: bool, colocate: bool) -> None:
    spec = cluster().colocated() if colocate else cluster(servers=2)
    with Lab(hosts(spec)) as lab:
        measured = run.run(lab, spec, run.LabPlan(policy, 6, streamed, exactly=True))
    applied = [worker for event in measured.events if isinstance(event, Applied) for worker in event.workers]
    assert sorted(applied) == sorted([0, 1, 2] * 6)
    assert measured.cost.gigabytes > 0.9 * 2 * (2 / 3 if colocate else 1) * 18 * 1e-4
    assert measured.cost.cpu_seconds > 0


@built
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "streamed"),
    [
        ("r2sp", False),
        pytest.param("r2sp", True, marks=pytest.mark.matrix),
        pytest.param("bsp", False, marks=pytest.mark.matrix),
    ],
)
def test_a_worker_that_is_killed_and_a_link_that_is_cut_cost_nothing_but_time(policy: str, streamed: bool) -> None:
    faults = (Fault(0.8, 1, "kill", 0.0), Fault(2.0, 1, "rejoin", 0.0), Fault(1.2, 2, "cut", 0.8))
    spec = cluster(servers=2, faults=faults, lease=1.0)
    with Lab(hosts(spec)) as lab:
        # The run itself compares the last model with what was applied.
        measured = run.run(lab, spec, run.LabPlan(policy, 40, streamed, exactly=not streamed))
    assert measured.report.lost >= 1


def test_the_audit_sees_an_update_too_few_and_one_in_two_halves() -> None:
    size = 4000
    model = -synthetic_worker.RATE * (
        2 * synthetic_worker.gradient_of(0, 1000) + synthetic_worker.gradient_of(1, 1000)
    ).astype(np.float32)
    assert synthetic_worker.differs(model, {0: 2, 1: 1}, size) is None
    assert synthetic_worker.differs(model, {0: 1, 1: 1}, size)
    model[:500] -= synthetic_worker.RATE * synthetic_worker.gradient_of(1, 1000)[:500]
    assert "of 1000 elements" in str(synthetic_worker.differs(model, {0: 2, 1: 1}, size))


# The command

TOML = """
[model]
bytes = 100e3
[servers]
count = 1
link = "40Mbit"
[[workers]]
count = 2
link = "40Mbit"
batch = 8
samples_per_second = 400
"""


@built
@pytest.mark.slow
@pytest.mark.alone
def test_the_command_prints_what_the_simulator_prints_and_more(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(TOML)
    arguments = [str(tmp_path / "two.toml"), "--policy", "bsp,r2sp", "--json", "--iterations", "8"]
    told = CliRunner().invoke(app, ["lab", *arguments, "--compare-simulation", "--ddp"])
    assert told.exit_code == 0, told.output
    measured = json.loads(told.stdout)
    simulated = json.loads(CliRunner().invoke(app, ["simulate", *arguments]).stdout)
    assert measured["measured"] is True
    assert 0.9 < measured["goodput_share"] < 1.01
    assert measured["limit_seconds"] == pytest.approx(simulated["limit_seconds"], rel=0.1)
    rows = {row["policy"]: row for row in measured["policies"]}
    assert list(rows) == ["bsp", "r2sp", "ddp"]
    assert simulated["policies"][0].keys() - rows["bsp"].keys() <= {"events", "simulated_seconds"}
    for row in measured["policies"][:2]:
        assert row["mean_iteration_seconds"] >= 0.9 * row["limit_seconds"]
        assert row["simulation_error"] == pytest.approx(
            row["simulated_iteration_seconds"] / row["mean_iteration_seconds"] - 1
        )


@built
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.matrix)])
def test_an_interrupted_lab_leaves_nothing_behind(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "two.toml").write_text(TOML)
    command = [sys.executable, "-m", "paceline", "lab", str(tmp_path / "two.toml"), "--iterations", "1000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    start = f"paceline-{process.pid}-"
    end = time.monotonic() + 60
    while not any(name.startswith(start) for name in os.listdir("/run/netns")) and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(3.0)
    process.send_signal(how)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert said.decode().strip().endswith("Interrupted; nothing was written.")
    assert not [name for name in os.listdir("/run/netns") if name.startswith(start)]


def test_what_does_not_go_together_is_refused_in_a_sentence(tmp_path: Path) -> None:
    for arguments, sentence in (
        (["lab-5mb", "--script", "nosuch.py"], "There is no script 'nosuch.py'."),
        (["lab-5mb", "--script", __file__, "--ddp"], "--script runs real training"),
        (["lab-5mb", "--apply", "half"], "--apply must be whole or streamed"),
    ):
        told = CliRunner().invoke(app, ["lab", *arguments])
        assert told.exit_code == 2
        assert sentence in told.output


def test_a_lab_has_as_many_hosts_as_the_cluster_has_machines() -> None:
    assert hosts(cluster(servers=2)) == dict.fromkeys(("server0", "server1", "worker0", "worker1", "worker2"), RATE)
    assert list(hosts(cluster().colocated())) == ["worker0", "worker1", "worker2"]
    slower = replace(cluster(), workers=(WorkerSpec(RATE / 2, 8, 100.0), *cluster().workers))
    assert hosts(slower)["worker0"] == RATE / 2


def test_leftovers_are_told_by_the_process_that_built_them() -> None:
    assert labs._born(os.getpid())
    assert labs._born(2**22 + 1) == ""
