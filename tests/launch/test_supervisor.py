"""The supervisor restarts workers, shows their output, and tells the user the error that ended the job.

The scripts here import nothing of paceline. They print the lines by which a worker reports to its supervisor.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.processes import JobError
from paceline.launch.supervisor import WorkerCommand, WorkerSupervisor
from paceline.serve import cores
from paceline.serve.restarts import RestartLimit

#: The beginning of each script. `first` is True until the script is started again.
HEAD = """
import os, pathlib, signal, sys, time
mark = pathlib.Path(__file__).with_suffix(".mark." + os.environ.get("PACELINE_RANK", "0"))
first = not mark.exists()
mark.touch()
def report(line):
    os.write(2, b"\\r" + line.encode() + b"\\n")
"""
JOINED, UPDATED = 'report("PACELINE_JOINED")\n', 'report("PACELINE_UPDATED")\n'
FAILS_LATER = JOINED + UPDATED + "if first: raise RuntimeError('the reason')\n"


class Supervised:
    """A supervisor of one script, and the lines that it shows."""

    def __init__(self, folder: Path, script: str, restarts: int = 1, **more: Any) -> None:
        path = folder / "script.py"
        path.write_text(HEAD + script)
        self.lines: list[str] = []
        self.states: list[str] = []  # of progress bars
        self.workers = more.get("workers", 1)
        self.supervisor = WorkerSupervisor(
            WorkerCommand([str(path)], "127.0.0.1:1", b"", **more), RestartLimit(restarts), self.say
        )

    def say(self, line: str, *, aside: bool, source: str = "", stays: bool = True) -> None:
        (self.lines if stays else self.states).append(line)

    def run(self, meanwhile: Callable[[], Awaitable[None]] | None = None) -> str:
        """Run the workers until they end. Return the error, or an empty string."""

        async def run() -> None:
            other = asyncio.ensure_future(meanwhile()) if meanwhile else None
            try:
                await self.supervisor.keep_all([None] * self.workers, colocate=False)
            finally:
                if other:
                    other.cancel()
                await self.supervisor.stop()

        try:
            asyncio.run(run())
        except JobError as error:
            return str(error)
        return ""

    async def wait_for(self, text: str) -> None:
        """Wait until this text was shown."""
        while not any(text in line for line in self.lines):
            await asyncio.sleep(0.01)

    @property
    def restarts(self) -> int:
        return sum("estarting it" in line for line in self.lines)


@pytest.mark.parametrize("joined", ["", JOINED])
@pytest.mark.parametrize("ending", ["raise RuntimeError('the reason')", "sys.exit('the reason')"])
def test_a_script_that_fails_before_its_first_update_is_not_restarted(joined: str, ending: str, tmp_path: Path) -> None:
    job = Supervised(tmp_path, joined + ending, restarts=5)
    error = job.run()
    assert job.restarts == 0
    assert error.startswith("Worker 0 ended with exit code 1 before its first update, so it is not restarted.")
    assert error.endswith("the reason")


def test_a_syntax_error_is_not_tried_again(tmp_path: Path) -> None:
    job = Supervised(tmp_path, "this is no Python", restarts=5)
    assert job.run().endswith("SyntaxError: invalid syntax")
    assert job.restarts == 0


def test_a_worker_that_fails_after_an_update_is_restarted(tmp_path: Path) -> None:
    job = Supervised(tmp_path, FAILS_LATER + "print('done')")
    assert job.run() == ""
    assert job.restarts == 1
    assert job.lines[-1] == "done"
    assert not any("PACELINE" in line for line in job.lines), "what a worker reports is not for the user"


def test_a_killed_worker_is_restarted_even_before_its_first_update(tmp_path: Path) -> None:
    job = Supervised(tmp_path, "if first: os.kill(os.getpid(), signal.SIGKILL)")
    assert job.run() == ""
    assert job.lines == ["Worker 0 was killed by SIGKILL; restarting it."]


def test_the_restarts_are_limited(tmp_path: Path) -> None:
    job = Supervised(tmp_path, UPDATED + "raise RuntimeError('the reason')", restarts=2)
    error = job.run()
    assert job.restarts == 2
    often = "after workers were restarted 2 times; allow more restarts with --restarts."
    assert error.startswith(f"Worker 0 ended with exit code 1 {often} Its last output:")
    assert error.endswith("RuntimeError: the reason")


def test_a_restarted_worker_that_loses_the_server_before_its_first_update_is_restarted_again(tmp_path: Path) -> None:
    """The server may be restarting, too. The restart of the worker spends a part of the limit."""
    script = """
turn = len(mark.read_text()) + 1
mark.write_text("x" * turn)
if turn == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if turn == 2:
    report("PACELINE_ERROR There is no server.")
    sys.exit(75)
"""
    job = Supervised(tmp_path, script, restarts=2)
    assert job.run() == ""
    assert job.lines == [
        "Worker 0 was killed by SIGKILL; restarting it.",
        "Worker 0: There is no server. Restarting it.",
    ]


def test_an_error_of_paceline_that_a_restart_cannot_fix_is_one_sentence(tmp_path: Path) -> None:
    job = Supervised(tmp_path, UPDATED + 'report("PACELINE_ERROR Do that.")\nsys.exit(78)', restarts=5)
    assert job.run() == "Do that."
    assert job.lines == []


def test_an_error_of_paceline_that_a_restart_may_fix_is_one_sentence(tmp_path: Path) -> None:
    job = Supervised(tmp_path, UPDATED + 'if first:\n    report("PACELINE_ERROR The link is down.")\n    sys.exit(75)')
    assert job.run() == ""
    assert job.lines == ["Worker 0: The link is down. Restarting it."]


def test_the_exception_of_the_script_comes_last_even_if_its_restart_finds_no_server(tmp_path: Path) -> None:
    job = Supervised(tmp_path, FAILS_LATER + 'report("PACELINE_ERROR There is no server.")\nsys.exit(75)')
    error = job.run()
    assert error.startswith("There is no server. Before that: Worker 0 ended with exit code 1.")
    assert error.endswith("RuntimeError: the reason")


def late(job: Supervised) -> Callable[[], Awaitable[None]]:
    """Return a function that ends the server once a worker is being restarted."""

    async def end() -> None:
        await job.wait_for("restarting it")
        await job.supervisor.end_with_server()

    return end


def test_a_worker_that_is_restarted_too_late_ends_with_its_own_exception_at_once(tmp_path: Path) -> None:
    """It would look for the server for a minute, while the display says that all is done."""
    job = Supervised(tmp_path, FAILS_LATER.replace(JOINED, "if first: " + JOINED) + "time.sleep(600)")
    error = job.run(late(job))
    assert error.startswith("Worker 0 ended with exit code 1. Its last output:")
    assert error.endswith("RuntimeError: the reason")


def test_the_others_have_done_the_part_of_a_worker_that_was_killed(tmp_path: Path) -> None:
    job = Supervised(tmp_path, "if first: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)")
    assert job.run(late(job)) == ""
    assert job.lines[-1] == "The job was done before worker 0 was back."


def test_a_worker_that_evaluates_after_the_job_is_not_stopped(tmp_path: Path) -> None:
    job = Supervised(tmp_path, FAILS_LATER + "print('joined again')\ntime.sleep(0.3)\nprint('accuracy 0.9')")

    async def end() -> None:
        await job.wait_for("joined again")
        await job.supervisor.end_with_server()

    assert job.run(end) == ""
    assert job.lines[-1] == "accuracy 0.9"


def test_the_rank_that_knows_the_reason_reports_it(tmp_path: Path) -> None:
    """The other ranks fail because of it, and may end before."""
    script = """
if os.environ["PACELINE_RANK"] == "1":
    sys.exit("Rank 0 has failed.")
time.sleep(0.3)
report("PACELINE_ERROR Do that.")
sys.exit(78)
"""
    assert Supervised(tmp_path, script, ranks=2).run() == "Do that."


# Output


def test_one_worker_has_no_number_before_its_lines(tmp_path: Path) -> None:
    job = Supervised(tmp_path, "print('a line')\nprint('an error', file=sys.stderr)")
    assert job.run() == ""
    assert sorted(job.lines) == ["a line", "an error"]


def test_several_workers_have_numbers_before_their_lines(tmp_path: Path) -> None:
    job = Supervised(tmp_path, "print('a line')", workers=2)
    assert job.run() == ""
    assert sorted(job.lines) == ["[0] a line", "[1] a line"]


def test_a_progress_bar_is_shown_while_it_is_drawn(tmp_path: Path) -> None:
    bar = "sys.stderr.write('\\r1 of 3')\nwhile not mark.with_name('seen').exists(): time.sleep(0.01)\n"
    job = Supervised(tmp_path, bar + UPDATED + "sys.stderr.write('\\r3 of 3')", workers=2)

    async def let_them_end_when_seen() -> None:
        while not {"[0] 1 of 3", "[1] 1 of 3"} <= set(job.states):
            await asyncio.sleep(0.01)
        (tmp_path / "seen").touch()

    assert job.run(let_them_end_when_seen) == ""
    assert sorted(job.lines) == ["[0] 3 of 3", "[1] 3 of 3"], "the last state stays"


# Cores


@pytest.mark.parametrize(("chosen", "threads"), [(None, "3"), ("5", "5")])
def test_workers_share_the_cores_of_the_machine(
    chosen: str | None, threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "available", lambda: 6)
    for name in cores.USER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    job = Supervised(tmp_path, "print(os.environ.get('OMP_NUM_THREADS'))", workers=2)
    assert job.run() == ""
    assert sorted(job.lines) == [f"[0] {threads}", f"[1] {threads}"]


@pytest.mark.parametrize(
    ("hosts", "ranks", "beside"),
    [((), 1, [3, 3, 3]), ((), 2, [6, 6, 6]), (("a", "b"), 1, [2, 1, 2]), (("a", "b", "a"), 4, [8, 4, 8])],
)
def test_only_processes_of_the_same_host_share_its_cores(hosts: tuple[str, ...], ranks: int, beside: list[int]) -> None:
    task = WorkerCommand(["train.py"], "here:1", b"", hosts=hosts, ranks=ranks, workers=3)
    assert [task.place_of_worker(label).processes for label in range(3)] == beside


def test_one_worker_may_use_all_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in cores.USER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert "OMP_NUM_THREADS" not in os.environ
    job = Supervised(tmp_path, "print(os.environ.get('OMP_NUM_THREADS'))")
    assert job.run() == ""
    assert job.lines == ["None"]


def test_a_host_that_ssh_cannot_reach_is_named_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f"#!/bin/sh\necho x >> {tmp_path}/calls\necho 'ssh: Could not resolve hostname nowhere' >&2\nexit 255\n"
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    error = Supervised(tmp_path, "", restarts=5, hosts=("nowhere",)).run()
    assert error.startswith("ssh could not start worker 0 on nowhere: try `ssh nowhere`, or correct --hosts.")
    assert error.endswith("ssh: Could not resolve hostname nowhere")
    assert (tmp_path / "calls").read_text() == "x\n"
