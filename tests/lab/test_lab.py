"""The lab: links have their rates, flows share them evenly, nothing is left behind, and the real server runs in it."""

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
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch")
pytest.importorskip("pyroute2")

from typer.testing import CliRunner

from lab.labs import best, built
from paceline.cli import app
from paceline.lab import leftovers, run, synthetic_worker
from paceline.lab.hosts import goodput, hosts
from paceline.lab.namespaces import Lab, LabError
from paceline.lab.plan import LabPlan
from paceline.observe.driver import Fault
from paceline.observe.trace import Applied
from paceline.simulate.cluster_spec import ClusterSpec, WorkerSpec

RATE = 5e6


@pytest.fixture
def small_lab() -> Iterator[Lab]:
    with Lab({"a": RATE, "b": RATE, "c": RATE}) as lab:
        yield lab


def cluster(workers: int = 3, servers: int = 1, faults: tuple[Fault, ...] = (), lease: float = 30.0) -> ClusterSpec:
    """Return a cluster with a model of 100 kB, which takes 20 ms to send and 30 ms to compute."""
    worker = WorkerSpec(RATE, 8, 8 / 0.03)
    return ClusterSpec("small", 1e5, servers, RATE, 0.0, 10e9, lease, (worker,) * workers, faults=faults)


# The network


def namespaces() -> set[str]:
    """Return the namespaces of labs that this process has built."""
    return {name for name in os.listdir("/run/netns") if name.startswith(f"paceline-{os.getpid()}-")}


@built
@pytest.mark.alone
def test_a_stream_reaches_the_rate_and_no_more(small_lab: Lab) -> None:
    assert best(lambda: goodput(small_lab), 0.93, most=1.01) > 0.93


def count_bytes(pipe: Connection, peers: int, seconds: float) -> None:
    """Count the bytes from each peer for some seconds, once all peers have connected."""
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


def send_forever(host: str, port: int) -> None:
    with socket.create_connection((host, port)) as peer:
        peer.recv(1)
        while True:
            peer.sendall(bytes(1 << 16))


@built
@pytest.mark.alone
@pytest.mark.slow
def test_two_senders_share_the_link_of_a_receiver_evenly(small_lab: Lab) -> None:
    def measured() -> npt.NDArray[np.float64]:
        ours, theirs = small_lab.pipe()
        counting = small_lab.start("c", count_bytes, theirs, 2, 1.5)
        port = ours.recv()
        sending = [small_lab.start(host, send_forever, small_lab.address("c"), port) for host in ("a", "b")]
        counts = list(ours.recv().values())
        small_lab.stop([counting, *sending])
        return np.array(counts) / (1.5 * RATE)

    for _ in range(4):  # other load on the machine disturbs a measurement
        shares = measured()
        assert shares.sum() < 1.02
        if shares.sum() > 0.9 and abs(shares[0] - shares[1]) < 0.05:
            return
    raise AssertionError(shares)


def echo(pipe: Connection) -> None:
    """Send the port through the pipe, and return to the first peer what it sends."""
    with socket.create_server(("0.0.0.0", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        peer, _ = listener.accept()
        while data := peer.recv(100):
            peer.sendall(data)


def talk(host: str, port: int, pipe: Connection) -> None:
    """Send words that come through the pipe, each followed by a timeout. Send back the answers, None for none."""
    with socket.create_connection((host, port)) as peer:
        while True:
            peer.sendall(pipe.recv())
            peer.settimeout(pipe.recv())
            try:
                pipe.send(peer.recv(100))
            except TimeoutError:
                pipe.send(None)


@pytest.mark.slow
@built
def test_a_cut_link_delays_bytes_until_it_is_mended(small_lab: Lab) -> None:
    ours, theirs = small_lab.pipe()
    small_lab.start("b", echo, theirs)
    port = ours.recv()
    client, clients_end = small_lab.pipe()
    small_lab.start("a", talk, small_lab.address("b"), port, clients_end)

    def exchange(word: bytes, timeout: float) -> bytes | None:
        client.send(word)
        client.send(timeout)
        answer: bytes | None = client.recv()
        return answer

    assert exchange(b"one", 5.0) == b"one"
    small_lab.cut("b")
    assert exchange(b"two", 0.5) is None
    small_lab.mend("b")
    assert exchange(b"", 10.0) == b"two"


@built
@pytest.mark.alone
@pytest.mark.slow
def test_two_labs_are_independent_and_leave_nothing_behind() -> None:
    with Lab({"a": RATE}) as one, Lab({"a": RATE, "b": RATE}) as other:
        assert one.namespace("a") != other.namespace("a")
        assert len(namespaces()) == 5
        sleeper = one.start("a", time.sleep, 100)
        assert best(lambda: goodput(other), 0.9, most=1.01) > 0.9
    assert not namespaces()
    assert sleeper.exitcode is not None


@built
@pytest.mark.alone
@pytest.mark.slow
def test_the_namespaces_of_a_killed_process_are_found_and_removed() -> None:
    script = (
        "import time; from paceline.lab.namespaces import Lab\n"
        "if __name__ == '__main__':\n"
        "    lab = Lab({'a': 1e6}).__enter__(); lab.start('a', time.sleep, 60); print('up', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == b"up\n"
    left = {name for name in os.listdir("/run/netns") if name.startswith(f"paceline-{process.pid}-")}
    assert len(left) == 2
    leftovers.sweep()
    assert left <= set(os.listdir("/run/netns")), "its process is alive"
    process.kill()
    process.wait()
    process.stdout.close()
    assert leftovers.sweep() == [next(iter(left)).rpartition("-")[0]]
    assert not left & set(os.listdir("/run/netns"))


def test_a_lab_without_root_or_linux_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match=r"^A lab needs root.*sudo.*\.$"):
        Lab({"a": 1.0})
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LabError, match=r"^A lab is made of Linux network namespaces.*\.$"):
        Lab({"a": 1.0})


@built
def test_an_unknown_host_and_a_host_that_fails_are_named(small_lab: Lab) -> None:
    with pytest.raises(LabError, match="There is no host 'd' in this lab; its hosts are a, b, c"):
        small_lab.address("d")
    with pytest.raises(LabError, match=r"A function on a failed: ValueError: math domain error"):
        import math

        small_lab.call("a", math.sqrt, -1.0)
    with pytest.raises(LabError, match="A function on b ended with exit code 3"):
        small_lab.call("b", os._exit, 3)


# The real server in a lab


@built
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "streamed", "colocate"),
    [
        pytest.param("bsp", False, False, marks=pytest.mark.matrix),
        ("r2sp", False, False),
        pytest.param("bsp:pipeline=true", False, False, marks=pytest.mark.matrix),
        pytest.param("r2sp", True, False, marks=pytest.mark.matrix),
        pytest.param("r2sp", True, True, marks=pytest.mark.core),
        pytest.param("asp", True, True, marks=pytest.mark.matrix),
    ],
)
def test_the_last_model_contains_every_update_once(policy: str, streamed: bool, colocate: bool) -> None:
    spec = cluster().colocated() if colocate else cluster(servers=2)
    with Lab(hosts(spec)) as lab:
        measured = run.run(lab, spec, LabPlan(policy, 6, streamed, exactly=True))
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
        # With exactly=True, the run compares the last model with the applied updates.
        measured = run.run(lab, spec, LabPlan(policy, 40, streamed, exactly=not streamed))
    assert measured.report.lost >= 1


def test_a_missing_update_and_half_an_update_are_detected() -> None:
    size = 4000
    model = -synthetic_worker.RATE * (
        2 * synthetic_worker.gradient_of(0, 1000) + synthetic_worker.gradient_of(1, 1000)
    ).astype(np.float32)
    assert synthetic_worker.difference(model, {0: 2, 1: 1}, size) is None
    assert synthetic_worker.difference(model, {0: 1, 1: 1}, size)
    model[:500] -= synthetic_worker.RATE * synthetic_worker.gradient_of(1, 1000)[:500]
    assert "of 1000 elements" in str(synthetic_worker.difference(model, {0: 2, 1: 1}, size))


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
@pytest.mark.slow
def test_the_json_has_the_fields_of_the_simulator_and_more(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(TOML)
    arguments = [str(tmp_path / "two.toml"), "--policy", "bsp,r2sp", "--json", "--iterations", "8"]
    measured: dict[str, Any] = {}

    def goodput_share() -> float:
        result = CliRunner().invoke(app, ["lab", *arguments, "--compare-simulation", "--ddp"])
        assert result.exit_code == 0, result.output
        measured.update(json.loads(result.stdout))
        return float(measured["goodput_share"])

    assert best(goodput_share, 0.9, most=1.01) > 0.9
    simulated = json.loads(CliRunner().invoke(app, ["simulate", *arguments]).stdout)
    assert measured["measured"] is True
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
@pytest.mark.parametrize("interrupt", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.matrix)])
def test_an_interrupted_lab_leaves_nothing_behind(tmp_path: Path, interrupt: signal.Signals) -> None:
    (tmp_path / "two.toml").write_text(TOML)
    command = [sys.executable, "-m", "paceline", "lab", str(tmp_path / "two.toml"), "--iterations", "1000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    start = f"paceline-{process.pid}-"
    end = time.monotonic() + 60
    while not any(name.startswith(start) for name in os.listdir("/run/netns")) and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(3.0)
    process.send_signal(interrupt)
    _, printed = process.communicate(timeout=120)
    assert process.returncode == 130
    assert printed.decode().strip().endswith("Interrupted; nothing was written.")
    assert not [name for name in os.listdir("/run/netns") if name.startswith(start)]


def test_options_that_contradict_each_other_are_refused_in_a_sentence() -> None:
    for arguments, sentence in (
        (["lab-5mb", "--script", "nosuch.py"], "There is no script 'nosuch.py'."),
        (["lab-5mb", "--script", __file__, "--ddp"], "--script runs real training"),
        (["lab-5mb", "--apply", "half"], "--apply must be whole or streamed"),
    ):
        result = CliRunner().invoke(app, ["lab", *arguments])
        assert result.exit_code == 2
        assert sentence in result.output


def test_a_lab_has_as_many_hosts_as_the_cluster_has_machines() -> None:
    assert hosts(cluster(servers=2)) == dict.fromkeys(("server0", "server1", "worker0", "worker1", "worker2"), RATE)
    assert list(hosts(cluster().colocated())) == ["worker0", "worker1", "worker2"]
    slower = replace(cluster(), workers=(WorkerSpec(RATE / 2, 8, 100.0), *cluster().workers))
    assert hosts(slower)["worker0"] == RATE / 2


def test_a_process_that_does_not_exist_has_no_start_time() -> None:
    assert leftovers.start_time(os.getpid())
    assert leftovers.start_time(2**22 + 1) == ""
