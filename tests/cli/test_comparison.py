"""`paceline run --link`, `--target` and `--plot`: mistakes are refused before anything is started."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from observe.test_final_report import REPORT
from paceline.cli import job
from paceline.cli.comparison import conclude
from paceline.cli.interruption import Interrupted
from paceline.launch import local
from paceline.observe.final_report import FinishedRun
from paceline.observe.metric_history import Target
from paceline.serve.wire import link
from shell import Shell

SCRIPT = "raise SystemExit('this script must not be started')\n"


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    (tmp_path / "train.py").write_text(SCRIPT)
    return Shell(tmp_path, capsys, monkeypatch, ("run",))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--link", "fast"), "--link must be a rate, such as 200Mbit or 25MB/s; got 'fast'."),
        (("--link", "200"), "--link must be a rate, such as 200Mbit or 25MB/s; got '200'."),
        (("--link", "0Mbit"), "--link 0Mbit: links can be emulated from 10kbit to 10Gbit."),
        (("--link=-5Mbit",), "--link -5Mbit: links can be emulated from 10kbit to 10Gbit."),
        (("--link", "9kbit"), "--link 9kbit: links can be emulated from 10kbit to 10Gbit."),
        (("--link", "40Gbit"), "--link 40Gbit: links can be emulated from 10kbit to 10Gbit."),
        (
            ("--link", "1Gbit", "--hosts", "a,b"),
            "--link emulates links between processes on this machine; leave it out with --hosts.",
        ),
        (
            ("--link", "1Gbit", "--servers", "0"),
            "--link emulates the links of the servers; with --servers 0 there are none.",
        ),
        (
            ("--target", "accuracy"),
            "--target must be a metric and its value, such as accuracy=0.97 or val_loss<0.1; got 'accuracy'.",
        ),
        (("--plot", "curve.jpg"), "--plot: 'curve.jpg' must end in .png, .svg or .pdf."),
        (
            ("--plot", "nowhere/curve.png"),
            "--plot: 'nowhere/curve.png' cannot be written; name a plain file in a folder that exists.",
        ),
    ],
)
def test_a_mistake_is_refused_in_one_sentence(arguments: tuple[str, ...], sentence: str, shell: Shell) -> None:
    ran = shell(*arguments, "train.py")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == sentence + "\n"


def test_a_plot_without_matplotlib_is_refused(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def find(name: str, *rest: Any) -> Any:
        return None if name == "matplotlib" else found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    ran = shell("--plot", "curve.png", "train.py")
    assert (ran.code, ran.err) == (2, '--plot needs matplotlib: pip install "paceline[plot]".\n')


def test_a_system_without_record_locks_is_refused(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "fcntl", None)
    ran = shell("--link", "200Mbit", "train.py")
    assert ran.code == 2
    assert ran.err == "--link 200Mbit: links cannot be emulated on this system, which has no record locks.\n"


@pytest.mark.parametrize(
    ("stop", "code", "last_line"),
    [
        (Interrupted(code=130), 130, "Interrupted. The model was not saved; "),
        (local.JobError("The script failed."), 1, "The script failed."),
    ],
)
def test_the_policies_that_finished_before_the_comparison_stopped_are_shown(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, stop: Exception, code: int, last_line: str
) -> None:
    outcomes: list[local.JobOutcome | Exception] = [local.JobOutcome(REPORT, 12.3), stop]

    async def run_job(*_: object) -> local.JobOutcome:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(job, "_run", run_job)
    ran = shell("--policy", "bsp,asp", "train.py")
    assert ran.code == code
    rows = [line.split() for line in ran.out.splitlines()]
    assert [row[:2] for row in rows if row[:1] in (["bsp"], ["asp"])] == [["bsp", "12.3"]]
    assert ran.err.splitlines()[-1].startswith(last_line)


def test_a_metric_that_nobody_reported_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = Target("accuracy", 0.97)
    runs = [FinishedRun(policy, REPORT, 1.0, target=target) for policy in ("bsp", "r2sp")]
    conclude(runs, "a title", target, tmp_path / "curve.png", compares=True)
    printed = capsys.readouterr()
    assert "sooner" not in printed.out and "never reached" not in printed.out
    assert "No worker has reported accuracy; call session.log(accuracy=…)." in printed.err
    assert "was not written" in printed.err
    assert not (tmp_path / "curve.png").exists()


def test_a_metric_with_a_misspelt_name_is_answered_with_the_reported_ones(capsys: pytest.CaptureFixture[str]) -> None:
    target, curves = Target("acuracy", 0.9), {"accuracy": [(1.0, 0.95)], "val_loss": [(1.0, 0.2)]}
    conclude([FinishedRun("bsp", REPORT, 1.0, curves=curves, target=target)], "a title", target, None, compares=False)
    assert "No worker has reported acuracy; reported were: accuracy, val_loss." in capsys.readouterr().err
