"""`paceline federate`: a federation's server and clients from the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline.cli import job as job_commands
from paceline.federated.client_data import share_of
from paceline.model import checkpoint
from shell import Shell
from train.jobs import job


@pytest.fixture
def federate(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.delenv("PACELINE_CONNECT", raising=False)
    return Shell(tmp_path, capsys, monkeypatch, ("federate",))


def test_a_client_takes_part_and_says_what_came_of_it(federate: Shell) -> None:
    with job("fl-r2sp:groups=1", workers=1) as running:
        ended = federate("client", "--connect", running.address, "--rounds", 3, "--steps", 30)
        running.finish()
    assert ended.code == 0, ended.err
    assert "client 0: round 3 of 3, loss" in ended.err
    assert ended.out.startswith("Client 0: 3 rounds in ")
    assert float(ended.out.split(";")[1].split("%")[0]) > 50


@pytest.mark.parametrize(
    ("options", "is_noted"), [((), True), (("--checkpoint", "kept"), False), (("--resume", "kept"), False)]
)
def test_a_server_that_saves_no_model_says_so_at_the_start(
    federate: Shell, options: tuple[str, ...], is_noted: bool
) -> None:
    federate.monkeypatch.setattr(job_commands, "serve", lambda **_: None)
    ended = federate("serve", "--clients", 8, *options)
    assert ended.code == 0
    assert ("the model is not saved" in ended.err) is is_noted, ended.err


@pytest.mark.parametrize(
    ("updates", "way_out"),
    [("int4/4", "use --updates int4."), ("float32/2", "use no --updates."), ("int3", "int8, int4")],
)
def test_clients_do_not_send_parts_of_their_updates(federate: Shell, updates: str, way_out: str) -> None:
    ended = federate("serve", "--clients", 8, "--updates", updates)
    assert ended.code == 2
    assert way_out in " ".join(ended.err.split())


def test_the_blacklist_of_a_running_server_is_read_and_cleared(federate: Shell) -> None:
    with job("fl-r2sp:groups=1", workers=1) as running:
        policy: Any = running.coordinator.ledger.policy
        policy.recall({"blacklist": {"17": [0.31, 0.22, 0.4], "3": [0.1]}})
        ended = federate("blacklist", running.address)
        assert (ended.code, ended.out) == (0, "client 3: 0.10\nclient 17: 0.31, 0.22, 0.40\n")
        ended = federate("blacklist", running.address, "--pardon", 3, "--pardon", 5)
        assert ended.out == "client 3: readmitted\nclient 5: was not excluded\nclient 17: 0.31, 0.22, 0.40\n"
        assert federate("blacklist", running.address, "--pardon-all").out == "client 17: readmitted\n"
        assert federate("blacklist", running.address).out == "No client is excluded.\n"
    with job("bsp") as running:
        ended = federate("blacklist", running.address)
        assert ended.code == 2 and "excludes no clients; serve with -p fl-r2sp" in ended.err
    ended = federate("blacklist", "127.0.0.1:1")
    assert ended.code == 2 and "127.0.0.1:1 does not answer" in ended.err and "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("client", "--connect", "127.0.0.1:1", "--client", 3, "--clients", 2), "--client must be from 0 to 1"),
        (("client", "--connect", "nowhere"), "A server's address is written host:port, not 'nowhere'."),
        (("client", "--connect", "127.0.0.1:1", "--dataset", "nothing"), "There is no data set 'nothing'"),
        (("client", "--connect", "127.0.0.1:1", "--network", "nothing"), "There is no network 'nothing'"),
        (
            ("serve", "-p", "fl-r2sp:fraction=0"),
            "fl-r2sp: fraction must be a number above 0 and at most 1, not '0'.",
        ),
        (("serve", "-p", "fl-r2sp:beta=7"), "fl-r2sp: beta must be a number from -1 to 1, not '7'."),
        (("serve", "-p", "fl-r2sp:groups=4", "--clients", 3), "4"),
    ],
)
def test_mistakes_are_told_in_a_sentence(federate: Shell, args: tuple[object, ...], said: str) -> None:
    ended = federate(*args)
    assert ended.code == 2
    assert said in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.slow
def test_a_taken_number_and_another_model_are_refused(federate: Shell) -> None:
    from paceline.federated import FederatedClient
    from paceline.federated.client_data import network_for
    from paceline.federated.partition import Skew

    share = share_of(0, 1, "digits", None, Skew(0.0), 0, 16, 0)
    with job("fl-r2sp:groups=1", workers=1) as running:
        taken = FederatedClient(network_for("mlp", share.data, 0), share, connect=running.address, client=3)
        client = ("client", "--connect", running.address, "--clients", 4, "--rounds", 1, "--steps", 1)
        for args, said in (
            (("--client", 3), "There already is a worker 3, and it is alive; give each worker its own number."),
            (("--client", 1, "--network", "cnn"), "All workers must train the same model"),
        ):
            ended = federate(*client, *args)
            assert ended.code == 2 and said in ended.err and "Traceback" not in ended.err, ended.err
        assert taken.run(2) == 2  # and nothing of it did any harm
        running.finish()


def test_all_clients_deal_the_samples_alike() -> None:
    from paceline.federated.partition import Skew

    shares = [share_of(client, 4, "digits", None, Skew(0.5), 0, 16, 3) for client in range(4)]
    again = share_of(2, 4, "digits", None, Skew(0.5), 0, 16, 3)
    assert torch.equal(shares[2].dataset, again.dataset)
    assert len({tuple(share.dataset.tolist()) for share in shares}) == 4
    assert all(len(share.dataset) == 1437 // 4 for share in shares)
    batches = list(shares[0])
    assert len(batches) == 359 // 16 and all(len(labels) == 16 for _, labels in batches)
    assert not torch.equal(next(iter(shares[0]))[1], next(iter(shares[0]))[1])  # in another order each time


@pytest.mark.matrix
@pytest.mark.slow
def test_a_server_killed_in_mid_round_loses_that_rounds_work_and_nothing_else(tmp_path: Path) -> None:
    """Server and clients as processes of their own. The clients do not notice but for the time it takes."""
    rounds, port, folder = 20, 7000 + os.getpid() % 2000, tmp_path / "kept"
    command = [sys.executable, "-m", "paceline", "federate"]
    serve = [*command, "serve", "--clients", "3", "-p", "fl-r2sp:groups=3", "--port", str(port)]

    def served(*more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*serve, *more], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    server = served("--checkpoint", str(folder), "--checkpoint-every", "2")
    clients = []
    try:
        for client in range(3):
            ask = ["--connect", f"127.0.0.1:{port}", "--client", str(client), "--clients", "3"]
            work = ["--rounds", str(rounds), "--steps", "30"]
            clients.append(subprocess.Popen([*command, "client", *ask, *work], stdout=subprocess.PIPE))
        began = time.monotonic()
        while not ((found := _newest(folder)) and found.version >= 12):
            assert time.monotonic() - began < 90 and server.poll() is None
            time.sleep(0.05)
        server.send_signal(signal.SIGKILL)
        server.wait()
        time.sleep(0.5)
        kept = _newest(folder)
        assert kept is not None and kept.job["memory"]["T"] > 0
        server = served("--resume", str(folder), "--checkpoint-every", "2")
        said = [client.communicate(timeout=120)[0].decode() for client in clients]
        assert all(f"{rounds} rounds in" in each for each in said)
        assert server.wait(60) == 0
        last = _newest(folder)
        assert last is not None and last.version >= kept.version + 3 * (rounds - kept.version // 3 - 4)
        assert max(float(each.split(";")[1].split("%")[0]) for each in said) > 85
    finally:
        for process in (server, *clients):
            process.kill()
            process.wait()


def _newest(folder: Path) -> checkpoint.Checkpoint | None:
    return checkpoint.newest(folder) if folder.is_dir() else None
