"""The option --page of the commands: values that are refused, and a recorded run in a command of its own."""

from __future__ import annotations

import http.client
import importlib.util
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from paceline.cli import page
from shell import Shell

TIMEOUT = 60.0
PACED = """
import time
from pathlib import Path

import paceline

with paceline.coordinate() as pace:
    while not Path("seen").exists():
        time.sleep(0.01)
    for _ in range(3):
        pace.proceed(batch_size=1)
"""


@pytest.fixture
def paceline(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(tmp_path, capsys, monkeypatch)


@pytest.mark.parametrize(
    "text", ["many", "localhost", "localhost:", ":8787", "8787.5", "²", "127.0.0.1:70000", "80000:1", "0:8787"]
)
def test_a_wrong_address_is_refused(paceline: Shell, text: str) -> None:
    outcome = paceline("simulate", "rlp-10", "--policy", "bsp", "--page", text)
    assert outcome.code == 2
    assert outcome.err == f"--page must be a port or HOST:PORT, such as 8787 or 0.0.0.0:8787; got {text!r}.\n"
    assert outcome.out == ""


def test_a_port_that_is_taken_is_refused(paceline: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = paceline("simulate", "rlp-10", "--policy", "bsp", "--page", port)
    assert outcome.code == 2
    assert f"--page cannot listen on 127.0.0.1:{port}" in outcome.err
    assert "choose another port" in outcome.err


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    def find(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        if host == "192.0.2.1":
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", find)
    with pytest.raises(SystemExit):
        page.page_place(f"{host}:0", None, None)
    said = capsys.readouterr().err
    assert said.startswith(f"--page cannot listen on {host}:0 (")
    assert said.endswith("): choose an address of this machine.\n")


def test_the_extra_is_named(paceline: Shell) -> None:
    found = importlib.util.find_spec
    paceline.monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name))
    outcome = paceline("simulate", "rlp-10", "--policy", "bsp", "--page", "8787")
    assert (outcome.code, outcome.err) == (2, '--page needs uvicorn: pip install "paceline[page]".\n')


@pytest.mark.parametrize(("token", "needed"), [(b"", "needs a token"), (b"a token of a job", "without TLS")])
def test_a_public_address_needs_a_token_and_tls(capsys: pytest.CaptureFixture[str], token: bytes, needed: str) -> None:
    with pytest.raises(SystemExit):
        page.page_place("0.0.0.0:0", token, None, insecure=False)
    said = capsys.readouterr().err
    assert said.startswith("--page: Listening on 0.0.0.0")
    assert needed in said


def test_a_recorded_run_at_a_public_address_makes_a_token_and_a_certificate() -> None:
    place = page.page_place("0.0.0.0:0", None, None)
    assert place
    assert place.url.startswith("https://")
    place.listening.close()
    assert len(place.token) >= 32
    assert place.tls and place.tls.cert


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "is a file; to look at a trace in a browser, add --page 8787."),
        (("--page", "0", "--trace", "b.jsonl"), "is recorded already."),
        (("--page", "0"), "run.jsonl is not a trace: line 1 is not an event of paceline."),
    ],
)
def test_files_that_cannot_be_watched(paceline: Shell, options: tuple[str, ...], text: str) -> None:
    (paceline.folder / "run.jsonl").write_text("no trace\n")
    outcome = paceline("watch", "run.jsonl", *options)
    assert outcome.code == 2
    assert text in outcome.err
    assert len(outcome.err.splitlines()) == 1, "no page is announced"


@pytest.mark.parametrize("name", ["nope.jsonl", "runs/nope"])
def test_a_trace_that_does_not_exist(paceline: Shell, name: str) -> None:
    outcome = paceline("watch", name, "--page", "0")
    assert outcome.code == 2
    assert outcome.err == (
        f"There is no file {name!r}; name a trace that exists, or the address of a server as host:port.\n"
    )


def test_the_speed_of_a_running_job_cannot_be_chosen(paceline: Shell) -> None:
    outcome = paceline("watch", "127.0.0.1:1", "--speed", "2")
    assert (outcome.code, outcome.err) == (
        2,
        "--speed is for a recorded run; a running job is shown at its own speed.\n",
    )


@pytest.mark.core
def test_a_simulation_is_shown_until_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline", "simulate", "rlp-10", "--policy", "bsp,asp", "--iterations", "20"]
    process = subprocess.Popen(
        [*command, "--page", "0", "--speed", "0"], stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stderr
    try:
        line = next(line for line in process.stderr if line.startswith("Page: "))
        port = int(line.rstrip("/\n").rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
        connection.request("GET", "/events")
        stream = connection.getresponse()
        while True:  # the first frame may come before the run has been told
            frame = json.loads(stream.readline().removeprefix(b"data: ") or b"{}")
            if frame.get("runs"):
                break
            assert stream.readline() == b"\n"
        assert frame["job"]["policy"] == "asp"
        assert [run["policy"] for run in frame["runs"]] == ["bsp"]
        assert frame["figures"]["floor"] > 0
        stream.close()
        connection.close()
    finally:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.core
def test_a_job_announces_a_page_that_answers_while_it_runs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PACED)
    command = [sys.executable, "-m", "paceline", "run", "--servers", "0", "--workers", "1", "--page", "0", str(script)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=tmp_path)
    assert process.stderr
    try:
        line = next(line for line in process.stderr if line.startswith("Page: "))
        found = re.fullmatch(r"Page: http://127\.0\.0\.1:(\d+)/\n", line)
        assert found
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=TIMEOUT)
        connection.request("GET", "/")
        answer = connection.getresponse()
        assert answer.status == 200
        assert b"<title>paceline</title>" in answer.read()
        connection.request("GET", "/events")
        stream = connection.getresponse()
        frame = json.loads(stream.readline().removeprefix(b"data: "))
        assert frame["job"]["title"] == "train.py"
        (tmp_path / "seen").touch()  # the script goes on to its end
        frames = [line for line in stream if line.startswith(b"data: {")]
        last = json.loads(frames[-1].removeprefix(b"data: "))
        assert last["over"]
        assert last["figures"]["updates"] == 3
        stream.close()
        connection.close()
        _, said = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert process.returncode == 0, said


def test_the_lab_refuses_a_wrong_address_before_it_is_built(paceline: Shell) -> None:
    namespaces = pytest.importorskip("paceline.lab.namespaces")
    pytest.importorskip("torch")
    paceline.monkeypatch.setattr(namespaces, "Lab", lambda _: pytest.fail("the lab was built"))
    outcome = paceline("lab", "lab-1mb", "--page", "many")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("--page must be a port or HOST:PORT")
