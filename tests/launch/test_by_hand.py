"""`paceline serve` and `work`, other hosts, Ctrl-C and wrong arguments. The workers here do not import torch."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.terminal import screen
from paceline.observe.trace import from_line

PACES = """
import os, sys, time
import paceline
with paceline.coordinate() as pace:
    for step in range(int(sys.argv[1])):
        pace.proceed(batch_size=4, loss=1.0 / (step + 1))
        if len(sys.argv) > 2:
            time.sleep(float(sys.argv[2]))
print("worker", pace.worker, "of", os.environ.get("PACELINE_WORKERS", "?"), "is done")
"""
LOCAL = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "SLURM_"))}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "paceline", *map(str, arguments)]


def paceline(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=120, check=False, env=LOCAL | more
    )


class Background:
    """A command that runs in the background, and its output so far."""

    def __init__(self, *arguments: object, **more: str) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command(*arguments), stdout=pipe, stderr=pipe, text=True, env=LOCAL | more, start_new_session=True
        )
        self.lines: list[str] = []
        self._new_line = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in (self.process.stdout, self.process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: object) -> None:
        with stream:  # type: ignore[attr-defined]
            for line in stream:  # type: ignore[attr-defined]
                with self._new_line:
                    self.lines.append(line.rstrip("\n"))
                    self._new_line.notify_all()

    def wait_for(self, text: str, seconds: float = 60.0) -> str:
        """Wait for the first line that contains this text, and return it."""
        end = time.monotonic() + seconds
        with self._new_line:
            while True:
                found = next((line for line in self.lines if text in line), None)
                if found is not None:
                    return found
                assert time.monotonic() < end, f"{text!r} is not in {self.lines}"
                self._new_line.wait(1.0)

    def address(self) -> str:
        """Wait until a server listens, and return its address."""
        return self.wait_for("Listening on ").removeprefix("Listening on ").rstrip(".")

    def ends(self, seconds: float = 60.0) -> int:
        """Wait until the command has ended, and return its exit code."""
        code = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(seconds)
        return code

    def children(self) -> list[int]:
        """Return the ids of all processes that this one started, directly or indirectly."""
        return _descendants(self.process.pid)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            if parent == pid:
                found += [int(entry.name), *_descendants(int(entry.name))]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def all_gone(pids: list[int], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(map(alive, pids)):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def started() -> Iterator[list[Background]]:
    """A list of commands that are killed at the end of the test."""
    running: list[Background] = []
    yield running
    for each in running:
        pids = [each.process.pid, *each.children()]
        for pid in pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        each.ends(20.0)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "paces.py"
    path.write_text(PACES)
    return path


@pytest.mark.core
def test_serve_and_work_are_separate_commands(script: Path, tmp_path: Path, started: list[Background]) -> None:
    token = tmp_path / "token"
    token.write_text("a-long-enough-secret\n")
    server = Background("serve", "--servers", 0, "--workers", 2, "-p", "bsp", "--token-file", token)
    started.append(server)
    where = server.address()
    ran = paceline("work", "--connect", where, "--workers", 2, "--token-file", token, script, 5)
    assert ran.returncode == 0, ran.stderr
    assert all(f"worker {number} of ? is done" in ran.stdout for number in (0, 1)), (
        "numbered in the order in which they joined"
    )
    assert server.ends() == 0
    assert any("updates" in line and "10" in line for line in server.lines), server.lines


@pytest.mark.slow
def test_the_rank_that_a_launcher_sets_is_the_workers_number(script: Path, started: list[Background]) -> None:
    """Under Slurm, each task runs `paceline work` and knows its rank and the number of tasks."""
    server = Background("serve", "--servers", 0, "-p", "bsp", SLURM_NTASKS="2", SLURM_PROCID="0")
    started.append(server)
    where = server.address()
    workers = [
        Background("work", "--connect", where, script, 3, SLURM_NTASKS="2", SLURM_PROCID=rank) for rank in ("4", "7")
    ]
    started.extend(workers)
    for rank, worker in zip((4, 7), workers, strict=True):
        worker.wait_for(f"worker {rank} of ? is done")
        assert worker.ends() == 0
        assert worker.lines == [f"worker {rank} of ? is done"], "one worker has no number before its lines"
    assert server.ends() == 0


@pytest.mark.slow
def test_other_hosts_are_reached_over_ssh(script: Path, tmp_path: Path) -> None:
    """This ssh runs the command locally. The token must not be part of the command line."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\necho "$4" >> {tmp_path}/hosts\necho "$5" >> {tmp_path}/commands\nexec sh -c "$5"\n')
    ssh.chmod(0o755)
    nproc = tmp_path / "bin" / "nproc"
    nproc.write_text("#!/bin/sh\necho 8\n")
    nproc.chmod(0o755)
    script.write_text(PACES + "print('threads', os.environ.get('OMP_NUM_THREADS'))\n")
    ran = paceline(
        *("run", "--servers", 0, "--workers", 3, "--hosts", "one,two", "--host", "127.0.0.1", script, 4),
        PATH=f"{ssh.parent}:{os.environ['PATH']}",
        OMP_NUM_THREADS="",
    )
    assert ran.returncode == 0, ran.stderr
    assert sorted((tmp_path / "hosts").read_text().split()) == ["one", "one", "two"]
    assert all(f"[{number}] worker {number} of 3 is done" in ran.stdout for number in range(3))
    assert "PACELINE_TOKEN=" not in (tmp_path / "commands").read_text()
    assert all(f"[{number}] threads 4" in ran.stdout for number in (0, 2)), "two workers share the cores of one"
    assert "[1] threads \n" in ran.stdout, "one worker has the cores of two for itself"


@pytest.mark.slow
@pytest.mark.parametrize("sent", [pytest.param(signal.SIGINT, marks=pytest.mark.core), signal.SIGTERM, signal.SIGKILL])
def test_one_signal_stops_all_processes(sent: signal.Signals, script: Path, started: list[Background]) -> None:
    """Ctrl-C, and even SIGKILL, which a process cannot catch, leave no process behind."""
    trace = script.with_suffix(".jsonl")
    job = Background("run", "--servers", 0, "--workers", 2, "--trace", trace, script, 100000, 0.01)
    started.append(job)
    end = time.monotonic() + 60
    while len(job.children()) < 3 and time.monotonic() < end:  # the server and two workers
        time.sleep(0.05)
    pids = job.children()
    assert len(pids) >= 3
    time.sleep(0.3)  # let them start training; the result does not depend on it
    job.process.send_signal(sent)
    code = job.ends()
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[sent]
    assert all_gone(pids), "a process was left behind"
    assert not any("Traceback" in line for line in job.lines), job.lines
    if sent is not signal.SIGKILL:
        assert job.lines[-1] == f"Interrupted. Written: {trace}."
        assert from_line(trace.read_text().splitlines()[-1])


@pytest.mark.slow
def test_a_job_that_crashes_too_often_ends_with_the_traceback(tmp_path: Path) -> None:
    script = tmp_path / "crash.py"
    script.write_text("import paceline\npaceline.coordinate().proceed(batch_size=1)\nraise ValueError('the reason')\n")
    ran = paceline("run", "--servers", 0, "--workers", 1, "--restarts", 1, "--lease", 1, script)
    assert ran.returncode == 1
    assert ran.stderr.count("restarting it") == 1
    assert "Its last output:" in ran.stderr
    assert ran.stderr.rstrip().endswith("ValueError: the reason")


@pytest.mark.slow
def test_ranks_of_one_worker_are_started_together(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, paceline\n"
        "names = ('PACELINE_WORKER', 'PACELINE_RANK', 'PACELINE_RANKS', 'MASTER_PORT')\n"
        "print(*(os.environ[name] for name in names))\n"
        "if os.environ['PACELINE_RANK'] == '0':\n"
        "    with paceline.coordinate() as pace:\n"
        "        pace.proceed(batch_size=1)\n"
    )
    ran = paceline("run", "--servers", 0, "--workers", 2, "--ranks-per-worker", 2, script)
    assert ran.returncode == 0, ran.stderr
    printed = sorted(line.split()[1:] for line in ran.stdout.splitlines() if line.startswith("["))
    assert [line[:3] for line in printed] == [["0", "0", "2"], ["0", "1", "2"], ["1", "0", "2"], ["1", "1", "2"]]
    assert printed[0][3] == printed[1][3] != printed[2][3] == printed[3][3], "a port for each worker"


# Output


class Terminal:
    """A command that runs in a pseudo-terminal."""

    def __init__(self, *arguments: object) -> None:
        here, there = pty.openpty()
        self.process = subprocess.Popen(
            command(*arguments),
            stdout=there,
            stderr=there,
            env=LOCAL | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
            start_new_session=True,
        )
        os.close(there)
        self._output = b""
        self._reader = threading.Thread(target=self._read, args=(here,), daemon=True)
        self._reader.start()

    def _read(self, here: int) -> None:
        with os.fdopen(here, "rb", buffering=0) as screen, contextlib.suppress(OSError):  # Linux raises it at the end
            while data := screen.read(4096):
                self._output += data

    @property
    def lines(self) -> list[str]:
        """The lines on the screen now."""
        return screen(self._output.decode(errors="ignore"))

    def wait_for(self, text: str, seconds: float = 60.0) -> str:
        """Wait for a line that contains this text, and return it."""
        end = time.monotonic() + seconds
        while not (found := [line for line in self.lines if text in line]):
            assert time.monotonic() < end, self.lines
            time.sleep(0.05)
        return found[0]

    def ends(self) -> int:
        """Wait until the command has ended, and return its exit code."""
        code = self.process.wait(60)
        self._reader.join(60)
        return code


@pytest.mark.slow
def test_a_terminal_shows_a_table_and_then_a_summary(script: Path) -> None:
    """In a pseudo-terminal, the table is drawn while the job runs and removed at its end."""
    script.write_text(PACES.replace("pace.proceed(", "print(f'\\r{step} of 30', end='', flush=True); pace.proceed("))
    job = Terminal("run", "--servers", 0, "--workers", 2, script, 30, 0.05)
    heading = job.wait_for("iteration")
    assert re.search(r"worker +state +iteration +samples/s +waiting +staleness +loss", heading)
    job.wait_for("computing")
    bars = [line for line in job.lines if re.match(r"\[[01]\] \d+ of 30", line)]
    assert len(bars) <= 2, "a progress bar changes in place"
    assert job.ends() == 0
    lines = job.lines
    assert any(re.search(r"updates +60", line) for line in lines), "the closing summary"
    assert sum("is done" in line for line in lines) == 2, "the output of the script is shown"
    assert heading not in lines


@pytest.mark.slow
def test_a_server_on_a_terminal_shows_its_address_and_whom_it_waits_for(script: Path) -> None:
    server = Terminal("serve", "--servers", 0, "--workers", 2, "-p", "bsp")
    try:
        where = server.wait_for("Listening on ").split()[-1].rstrip(".")
        server.wait_for("0 workers, waiting for 2 workers")
        environment = LOCAL | {"PACELINE_CONNECT": where}
        started = [sys.executable, str(script), "3"]
        first = subprocess.Popen(started, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        server.wait_for("1 worker, waiting for 1 more")
        assert any(where in line for line in server.lines), "the table does not erase the address"
        second = subprocess.run(started, env=environment, capture_output=True, text=True, check=False, timeout=60)
        _, errors = first.communicate(timeout=60)
        assert server.ends() == 0
        assert any(where in line for line in server.lines)
        assert errors.splitlines() == [
            "Joined the job as worker 0; waiting for 1 more worker.",
            "All workers have joined; the job begins.",
        ]
        assert second.stderr.splitlines() == ["Joined the job as worker 1."]
    finally:
        server.process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["python", "work"])
def test_a_worker_leaves_at_control_c(how: str, script: Path, started: list[Background]) -> None:
    server = Background("serve", "--servers", 0, "--workers", 1, "-p", "asp")
    started.append(server)
    script.write_text(PACES.replace("    for step", "    print('Begun.', file=sys.stderr)\n    for step"))
    where, steps = server.address(), (str(script), "100000", "0.01")
    begins = [sys.executable] if how == "python" else command("work", "--connect", where)
    environment = LOCAL | ({"PACELINE_CONNECT": where} if how == "python" else {})
    worker = subprocess.Popen([*begins, *steps], env=environment, stderr=subprocess.PIPE, text=True)
    assert worker.stderr is not None
    for line in iter(worker.stderr.readline, "Begun.\n"):
        assert line == "Joined the job as worker 0.\n"
    worker.send_signal(signal.SIGINT)
    _, errors = worker.communicate(timeout=60)
    by_hand = "Interrupted; this worker leaves the job.\n"
    assert errors == (by_hand if how == "python" else "Interrupted; the workers of this machine have left the job.\n")
    assert worker.returncode == (-2 if how == "python" else 130)
    assert server.ends(20.0) == 0, "it does not wait for the worker's lease to end"


@pytest.mark.slow
def test_a_wrong_token_is_one_sentence_and_is_not_tried_again(script: Path, started: list[Background]) -> None:
    server = Background("serve", "--servers", 0, "--workers", 1, "-p", "asp", PACELINE_TOKEN="aa" * 16)
    started.append(server)
    ran = paceline("work", "--connect", server.address(), script, 1)
    refused(ran, "The job's token is wrong; give every worker and server the same one.", code=1)


@pytest.mark.slow
def test_a_trace_that_opens_in_perfetto(script: Path, tmp_path: Path) -> None:
    trace = tmp_path / "run.perfetto.json"
    ran = paceline("run", "--servers", 0, "--workers", 2, "-p", "bsp", "--trace", trace, script, 5)
    assert ran.returncode == 0, ran.stderr
    events = json.loads(trace.read_text())["traceEvents"]
    named = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"bsp | worker 0", "bsp | worker 1"} <= named
    assert sum(event["ph"] == "X" for event in events) >= 2 * 5, "at least one slice for each iteration"
    assert {path.name for path in tmp_path.iterdir()} == {script.name, trace.name}


@pytest.mark.slow
def test_a_job_is_watched_from_another_terminal(script: Path, started: list[Background]) -> None:
    server = Background("serve", "--servers", 0, "--workers", 1, "-p", "asp")
    started.append(server)
    where = server.address()
    watching = Background("watch", where)
    started.append(watching)
    ran = paceline("work", "--connect", where, script, 40, 0.1)
    assert ran.returncode == 0, ran.stderr
    assert server.ends() == 0
    assert watching.ends() == 0
    counted = re.search(r"^updates +(\d+)", "\n".join(watching.lines), re.MULTILINE)
    assert counted, watching.lines
    assert 0 < int(counted[1]) <= 40, "counted from the start of watching"


# Wrong arguments


def refused(ran: subprocess.CompletedProcess[str], reason: str, code: int = 2) -> None:
    """Check that a command printed one sentence with the reason, and ended with the code."""
    assert ran.returncode == code, ran.stderr
    assert reason in ran.stderr
    assert "Traceback" not in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1, ran.stderr


@pytest.mark.slow
def test_a_port_in_use(script: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(paceline("serve", "--servers", 0, "--port", port), f"Cannot listen on 127.0.0.1:{port}")


@pytest.mark.slow
def test_a_public_address_without_a_token(script: Path) -> None:
    refused(paceline("serve", "--servers", 0, "--host", "0.0.0.0"), "needs a token, so that strangers cannot join")


@pytest.mark.slow
def test_a_token_that_is_too_short_or_missing(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("short")
    refused(paceline("serve", "--servers", 0, "--token-file", tmp_path / "token"), "too short to be safe")
    refused(paceline("serve", "--servers", 0, "--token-file", tmp_path / "none"), "cannot be read")


@pytest.mark.slow
def test_a_policy_that_needs_more_workers(script: Path) -> None:
    refused(
        paceline("run", "--workers", 2, "-p", "ksync:k=3", script, 1),
        "ksync:k=3 needs at least 3 workers, and there are 2; use --workers 3.",
    )


@pytest.mark.slow
def test_an_unknown_policy(script: Path) -> None:
    refused(paceline("run", "-p", "r2ps", script, 1), "Did you mean 'r2sp'?")


@pytest.mark.slow
def test_a_missing_checkpoint(script: Path, tmp_path: Path) -> None:
    refused(paceline("run", "--resume", tmp_path / "none", script, 1), "There is no checkpoint at")
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_checkpoint_interval_without_a_folder(script: Path) -> None:
    refused(paceline("run", "--checkpoint-every", "10", script, 1), "--checkpoint-every needs --checkpoint")


@pytest.mark.slow
def test_a_wrong_checkpoint_interval(script: Path, tmp_path: Path) -> None:
    for wrong in ("often", "-3s"):
        ran = paceline("run", "--checkpoint", tmp_path / "job", f"--checkpoint-every={wrong}", script, 1)
        refused(ran, f"not '{wrong}'")


@pytest.mark.slow
def test_a_wrong_address(script: Path) -> None:
    refused(paceline("work", "--connect", "somewhere", script, 1), "written host:port, not 'somewhere'")


@pytest.mark.slow
def test_tls_without_a_key(tmp_path: Path) -> None:
    refused(paceline("serve", "--servers", 0, "--tls-ca", tmp_path / "ca.pem"), "give --tls-cert and --tls-key")


@pytest.mark.slow
def test_watching_an_address_without_a_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    refused(paceline("watch", f"127.0.0.1:{port}"), "There is no server at")
