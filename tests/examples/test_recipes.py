"""The recipes: each page shows lines of its script, and each script does what its page says."""

from __future__ import annotations

import contextlib
import csv
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from examples import pages
from examples.scripts import ROOT, Scripts
from paceline.observe.trace import Arrived, Granted, Measured

SCRIPTS = sorted([*(ROOT / "examples/recipes").glob("*.py"), *(ROOT / "examples/port").glob("*/after.py")])
PACELINE = [sys.executable, "-m", "paceline"]

each_page = pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.stem)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Scripts:
    monkeypatch.chdir(tmp_path)
    return Scripts(monkeypatch)


@each_page
def test_a_page_shows_lines_of_its_script(page: Path) -> None:
    linked = pages.scripts(page)
    assert linked, f"{page.name} links to no script"
    shown = pages.blocks(page, "python")
    assert shown or pages.blocks(page, "diff")
    for block in shown:
        assert any(pages.is_part(block, script.read_text()) for script in linked), f"{page.name}:\n{block}"


def test_every_page_and_every_script_has_its_place() -> None:
    index = pages.INDEX.read_text()
    assert [page.name for page in pages.PAGES if f"({page.name})" not in index] == []
    linked = {script for page in (*pages.PAGES, pages.ARRAYS) for script in pages.scripts(page)}
    assert [script for script in SCRIPTS if script not in linked] == []
    assert "(../arrays.md)" in index
    assert "(recipes/README.md)" in (ROOT / "docs/README.md").read_text()


def test_a_block_that_is_not_in_the_script_is_noticed() -> None:
    script = "def f():\n    a = 1\n    b = 2\n    c = 3\n"
    assert pages.is_part("a = 1\nb = 2\n", script) and pages.is_part("a = 1\n...\nc = 3\n", script)
    assert not pages.is_part("a = 1\nc = 3\n", script) and not pages.is_part("c = 3\n...\na = 1\n", script)


def test_the_main_worker_evaluates(scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    job = scripts.together("examples/recipes/evaluate.py", "--epochs", "2", policy="r2sp:weights=mean")
    printed = [float(found) for found in re.findall(r"accuracy ([0-9.]+)%", capsys.readouterr().out)]
    logged = [event.value for event in job.events if isinstance(event, Measured) and event.kind == "accuracy"]
    assert len(printed) == len(logged) == 2
    assert printed == pytest.approx([100 * value for value in logged], abs=0.06)
    assert logged[-1] > 0.6
    assert set(torch.load("best.pt", weights_only=True)) == {"1.weight", "1.bias", "3.weight", "3.bias"}


def test_metrics_go_to_the_file_of_one_worker_and_to_the_trace(scripts: Scripts) -> None:
    job = scripts.together("examples/recipes/log_metrics.py", "--epochs", "2", policy="r2sp:weights=mean")
    with open("metrics.csv") as file:
        rows = list(csv.DictReader(file))
    losses = [row for row in rows if row["name"] == "loss"]
    assert [int(row["step"]) for row in losses] == list(range(0, 10 * len(losses), 10)) and len(losses) > 2
    (accuracy,) = (event.value for event in job.events if isinstance(event, Measured))
    assert float(rows[-1]["value"]) == pytest.approx(accuracy, abs=1e-5)
    assert all(event.loss is not None for event in job.events if isinstance(event, Arrived))


def test_a_slow_machine_gets_smaller_batches(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOW_WORKER", "1")
    policy = "r2sp:tune_batches=true,weights=mean"
    job = scripts.together("examples/recipes/mixed_machines.py", "--epochs", "3", policy=policy)
    sizes: dict[int, list[int]] = {0: [], 1: []}
    for event in job.events:
        if isinstance(event, Granted) and event.batch_size:
            sizes[event.worker].append(event.batch_size)
    assert sizes[0][-1] >= 2 * sizes[1][-1]


def test_clients_with_other_data_learn_one_model(scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    """A client alone has three or four of the ten digits, so it cannot recognize more than 40% of all."""
    scripts.together("examples/recipes/federated.py", "--client", "{worker}", workers=3)
    accuracies = [float(found) for found in re.findall(r"accuracy on all: ([0-9.]+)%", capsys.readouterr().out)]
    assert len(accuracies) == 3 and min(accuracies) > 75


@pytest.mark.slow
def test_two_ranks_of_a_worker_equal_one_process(scripts: Scripts) -> None:
    script = "examples/recipes/several_gpus.py"
    command = [*PACELINE, "run", "--workers", "1", "--ranks-per-worker", "2", str(ROOT / script)]
    ran = subprocess.run(
        [*command, "--epochs", "1", "--save", "two.pt"], capture_output=True, text=True, timeout=180, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert sorted(re.findall(r"process (\d) of 2", ran.stdout)) == ["0", "1"]
    scripts.alone(script, "--epochs", "1", "--batch-size", "32", "--save", "one.pt")
    one, two = torch.load("one.pt"), torch.load("two.pt")
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-5, atol=1e-5)


class Command:
    """A command that runs beside the test, and the lines that it has printed."""

    def __init__(self, words: list[str], output: Path) -> None:
        self._output = output
        self._file: IO[bytes] = output.open("wb")
        self.process = subprocess.Popen([*PACELINE, *words], stdout=self._file, stderr=subprocess.STDOUT)

    def printed(self) -> str:
        return self._output.read_text()

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.printed():
            assert time.monotonic() < deadline and self.process.poll() in (None, 0), self.printed()
            time.sleep(0.02)

    def wait(self, seconds: float = 60.0) -> int | None:
        """Return the exit code of the command, or None if it does not end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self._file.close()


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


@pytest.mark.slow
def test_a_killed_spot_instance_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the page, with a free port and a shorter lease."""
    monkeypatch.chdir(tmp_path)
    port = free_port()
    serve, work = (
        [word.replace("7000", port).replace("examples/", f"{ROOT}/examples/") for word in words[1:]]
        for words in pages.commands(pages.FOLDER / "spot.md")[:2]
    )
    serve[serve.index("--lease") + 1] = "1"
    commands = [Command(serve, tmp_path / "server.txt")]
    try:
        commands[0].wait_for("Listening")
        # With few epochs, two workers may be done before the third has started on a busy machine.
        commands += [Command([*work, "--epochs", "20"], tmp_path / f"{number}.txt") for number in range(3)]
        workers = commands[1:]
        for each in workers:  # the job begins with two, and the third joins while they train
            each.wait_for("joined")
        workers[1].process.send_signal(signal.SIGKILL)
        for each in (workers[0], workers[2]):
            assert each.wait() == 0, "\n".join(command.printed() for command in commands)
        commands[0].process.send_signal(signal.SIGINT)  # the server would wait a minute for the killed worker
        assert commands[0].wait() is not None, commands[0].printed()
        assert "accuracy" in workers[0].printed() and "accuracy" in workers[2].printed()
        assert "accuracy" not in workers[1].printed()
        assert any((tmp_path / "runs/spot").iterdir())
    finally:
        for each in commands:
            each.stop()


@pytest.mark.matrix
@pytest.mark.slow
@each_page
def test_the_commands_of_a_page_run_as_printed(page: Path, tmp_path: Path) -> None:
    """Commands that serve run beside the others."""
    beside: list[subprocess.Popen[bytes]] = []
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    try:
        for words in pages.commands(page):
            variables = dict(word.split("=", 1) for word in words if re.match(r"^[A-Z_]+=", word))
            command, settings = words[len(variables) :], environment | variables
            if command[:2] == ["pip", "install"]:
                continue
            if "serve" in command:
                beside.append(subprocess.Popen(command, cwd=tmp_path, env=settings))
                time.sleep(5.0)
            elif "--connect" in command:
                beside.append(subprocess.Popen(command, cwd=tmp_path, env=settings))
            else:
                ran = subprocess.run(command, cwd=tmp_path, env=settings, timeout=300, check=False)
                assert ran.returncode == 0, " ".join(words)
        for each in beside:
            assert each.wait(120.0) == 0
    finally:
        for each in beside:
            each.kill()
            each.wait()
