"""`--metrics` and `--log` on the command line."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from metrics.test_background import NotingTracker
from paceline.cli.display import Display
from paceline.cli.reports import Reports
from paceline.metrics import targets
from paceline.observe.summary import Summary
from shell import Shell

REPOSITORY = Path(__file__).parents[2]
RECIPE = REPOSITORY / "examples" / "recipes" / "log_metrics.py"


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    (tmp_path / "train.py").write_text("")
    for variable in ("PACELINE_TOKEN", "PACELINE_TOKEN_FILE"):
        monkeypatch.delenv(variable, raising=False)
    return Shell(tmp_path, capsys, monkeypatch)


@pytest.mark.parametrize("command", [("run",), ("serve",), ("federate", "serve", "--clients", "8")])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--log", "tensorbord:x"), "did you mean tensorboard:x"),
        (("--log", "x"), "--log must be tensorboard:DIR, mlflow:URI or wandb:PROJECT, not 'x'."),
        (("--metrics", "http"), "--metrics must be a port or HOST:PORT, such as 9464 or 0.0.0.0:9464; got 'http'."),
        (("--metrics", "70000"), "--metrics must be a port or HOST:PORT, such as 9464 or 0.0.0.0:9464; got '70000'."),
        (("--metrics", "0.0.0.0:9464"), "--metrics at 0.0.0.0 can be reached by others and needs a token"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(
    shell: Shell, command: tuple[str, ...], options: tuple[str, ...], message: str
) -> None:
    pytest.importorskip("torch")
    if "--metrics" in options:
        pytest.importorskip("prometheus_client")
    outcome = shell(*command, *options, *(["train.py"] if command == ("run",) else []))
    assert outcome.code == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err
    assert shell.files() == {"train.py"}


@pytest.mark.parametrize("kind", targets.MODULES)
def test_a_missing_library_is_named_with_its_extra(shell: Shell, kind: str) -> None:
    pytest.importorskip("torch")
    found, module = importlib.util.find_spec, targets.MODULES[kind]
    shell.monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else found(name))
    outcome = shell("run", "--log", f"{kind}:x", "train.py")
    assert (outcome.code, outcome.err) == (2, f'--log {kind} needs {module}: pip install "paceline[{kind}]".\n')


def test_an_address_that_others_can_reach_needs_tls_too(shell: Shell) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("prometheus_client")
    (shell.folder / "job.token").write_text("a-token-that-is-long-enough\n")
    shell.monkeypatch.setenv("PACELINE_TOKEN_FILE", str(shell.folder / "job.token"))
    outcome = shell("run", "--metrics", "0.0.0.0:9464", "train.py")
    assert outcome.code == 2
    assert "--metrics at 0.0.0.0 without TLS shows the token to the network" in outcome.err
    assert "give --tls-cert and --tls-key" in outcome.err


@pytest.mark.parametrize(("is_done", "is_saved"), [(True, True), (False, True), (True, False)])
def test_a_job_that_was_stopped_or_is_not_saved_has_failed_in_the_logs(is_done: bool, is_saved: bool) -> None:
    tracker = NotingTracker()
    target: Any = SimpleNamespace(tracker=lambda: tracker)
    with Display("bsp", None, reports=Reports(targets=(target,))) as display:
        display.finish(Summary().report(), 0.0, is_done=is_done, is_saved=is_saved, show=False)
    assert tracker.ended is not (is_done and is_saved)


def test_a_job_that_never_finishes_has_failed_in_the_logs() -> None:
    tracker = NotingTracker()
    target: Any = SimpleNamespace(tracker=lambda: tracker)
    with Display("bsp", None, reports=Reports(targets=(target,))), contextlib.suppress(KeyboardInterrupt):
        raise KeyboardInterrupt
    assert tracker.ended is True


@pytest.mark.core
def test_a_job_is_served_and_logged_while_it_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("prometheus_client")
    pytest.importorskip("tensorboardX")
    command = [sys.executable, "-m", "paceline", "run", "-p", "r2sp", "--metrics", "0", "--log", "tensorboard:runs"]
    script = [RECIPE, "--epochs", "8", "--metrics", "own.csv"]
    job = subprocess.Popen(
        [str(each) for each in (*command, *script)], cwd=tmp_path, env=os.environ, stderr=subprocess.PIPE, text=True
    )
    assert job.stderr
    seen, end = 0.0, time.monotonic() + 120
    try:
        url = next(line for line in job.stderr if line.startswith("Metrics: ")).split()[1]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", url)
        while job.poll() is None and time.monotonic() < end:
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    text = answer.read().decode()
            except OSError:
                time.sleep(0.05)
                continue
            seen = max(seen, *map(float, re.findall(r"^paceline_samples_total (\S+)$", text, re.M)))
        said = job.communicate(timeout=60)[1]
    finally:
        job.kill()
    assert job.returncode == 0, said
    assert seen > 0, "the samples are counted while the job runs"
    (events,) = tmp_path.glob("runs/log_metrics-r2sp-*/events.out.tfevents.*")
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulators.EventAccumulator(str(events)).Reload()
    assert {"loss", "accuracy", "samples_per_second", "staleness"} <= set(read.Tags()["scalars"])
    assert read.Scalars("accuracy")[-1].value > 0.8
