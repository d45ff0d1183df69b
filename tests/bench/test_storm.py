"""The faults of the storm happen: connections end from outside, checkpoints are damaged, and a job goes through all."""

from __future__ import annotations

import random
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from benchmarks import ROOT, storm_faults
from benchmarks.storm_faults import Storm

#: Connects to a port, says so, and prints how its connection ends.
CONNECTS = """
import socket, sys
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
peer.sendall(b"x")
try:
    print(peer.recv(1))
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("reset", [False, True], ids=["cut", "reset"])
def test_a_connection_of_another_process_ends(reset: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-c", CONNECTS, str(listener.getsockname()[1])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            peer, _ = listener.accept()
            with peer:
                assert peer.recv(1) == b"x"
                assert storm_faults._disconnect(child.pid, random.Random(0), reset)
                if reset:
                    with pytest.raises(ConnectionResetError):
                        peer.recv(1)
                else:
                    assert peer.recv(1) == b""
            assert child.stdout is not None
            assert child.stdout.read().strip() in (["BrokenPipeError", "ConnectionResetError"] if reset else ["b''"])


def test_a_process_without_a_connection_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert not storm_faults._disconnect(child.pid, random.Random(0), reset=True)
        child.communicate(b"\n")


def test_a_process_can_write_no_file_until_the_limit_is_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "file"
    script = (
        "import pathlib, sys\nfor line in sys.stdin:\n"
        f"    try:\n        pathlib.Path({str(path)!r}).write_bytes(b'x')\n        print('written', flush=True)\n"
        "    except OSError:\n        print('full', flush=True)\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True, bufsize=1) as child:
        assert child.stdin is not None and child.stdout is not None
        before = resource.prlimit(child.pid, resource.RLIMIT_FSIZE)
        for size, expected in ((0, "full"), (None, "written")):
            storm_faults._limit_files(child.pid, size)
            child.stdin.write("try\n")
            assert child.stdout.readline().strip() == expected
        assert resource.prlimit(child.pid, resource.RLIMIT_FSIZE) == before
        child.stdin.close()


def test_only_the_newest_of_two_checkpoints_is_damaged(tmp_path: Path) -> None:
    storm = Storm(random.Random(1), 1.0, 1.0, damage=True)
    storm._checkpoints = tmp_path
    old, new = tmp_path / "version-000000001", tmp_path / "version-000000002"
    old.mkdir()
    (old / "job.json").write_bytes(b"abc")
    assert not storm._damage_newest(), "it is the only one"
    new.mkdir()
    (new / "job.json").write_bytes(b"abc")
    for _ in range(20):
        (new / "job.json").write_bytes(b"abc")
        assert storm._damage_newest()
        assert (new / "job.json").read_bytes() != b"abc"
    assert (old / "job.json").read_bytes() == b"abc"


@pytest.mark.matrix
@pytest.mark.slow
def test_a_job_goes_through_a_short_storm() -> None:
    command = [sys.executable, ROOT / "benchmarks" / "storm.py", "--minutes", "0.5", "--policy", "r2sp"]
    ran = subprocess.run([*map(str, command), "--calm", "0"], capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "exact" in ran.stdout
