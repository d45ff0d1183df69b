"""`paceline policies learn`: its results, and the errors of wrong options."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")


import threads
from paceline.rlp.features import StateFeatures
from paceline.rlp.network_file import load
from paceline.rlp.rules import ACTIONS
from shell import Shell

QUICK = ("policies", "learn", "--size", "bundled", "--instances", "4", "--budget", "20", "--jobs", "1")


one_thread = pytest.fixture(autouse=True)(threads.one_thread)


@pytest.fixture
def paceline(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(tmp_path, capsys, monkeypatch)


@pytest.mark.core
def test_the_learned_network_is_a_policy(paceline: Shell, tmp_path: Path) -> None:
    out = tmp_path / "mine.safetensors"
    run = paceline(*QUICK, "--episodes", "64", "--out", str(out))
    assert run.code == 0, run.err
    assert "64 episodes" in run.err
    assert f"rlp:network={out}" in run.err
    shown = paceline("simulate", "rlp-10", "-p", f"rlp:network={out}", "--iterations", "12")
    assert shown.code == 0, shown.err
    more = paceline(*QUICK, "--episodes", "128", "--out", str(out), "--resume")
    assert more.code == 0, more.err
    assert "128 episodes" in more.err
    assert more.err.count("episodes: the network") == 1, "a resumed run plays only new episodes"


@pytest.mark.slow
def test_the_features_of_the_state_can_be_chosen(paceline: Shell, tmp_path: Path) -> None:
    out = tmp_path / "bare.safetensors"
    shown = ("--no-scene", "--history", "2", "--validated", "--workers", "3,2")
    run = paceline(*QUICK, "--episodes", "64", "--out", str(out), *shown)
    assert run.code == 0, run.err
    assert load(str(out)).state == StateFeatures(history=2, scene=False, validated=True)


def test_it_learns_by_the_papers_algorithm(paceline: Shell, tmp_path: Path) -> None:
    out = tmp_path / "paper.safetensors"
    run = paceline(*QUICK, "--paper", "--no-pretrained", "--episodes", "32", "--out", str(out))
    assert run.code == 0, run.err
    assert "32 episodes" in run.err
    assert paceline("simulate", "rlp-10", "-p", f"rlp:network={out}", "--iterations", "12").code == 0


def test_ctrl_c_keeps_what_the_papers_algorithm_has_learned(
    paceline: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.rlp.dqn.DqnLearner.learn", interrupted)
    out = tmp_path / "paper.safetensors"
    run = paceline(*QUICK, "--paper", "--no-pretrained", "--episodes", "32", "--out", str(out))
    assert "Interrupted after 0 episodes" in run.err
    assert load(str(out)).rules == ACTIONS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--paper", "--resume"), "--paper writes no checkpoint"),
        (("--workers", "4,x"), "--workers must be numbers from 1, separated by commas; got '4,x'."),
        (("--workers", "0"), "--workers must be numbers from 1, separated by commas; got '0'."),
        (("--size", "giant"), "There is no size 'giant'; choose one of whole, small, tiny, bundled."),
        (("--out", "/nowhere/at/all"), "--out: '/nowhere/at/all' cannot be written"),
        (("--resume",), "leave out --resume to start"),
        (("--device", "abacus"), "There is no device 'abacus'"),
        (("--size", "tiny", "--data", "/nowhere"), "which is not a folder"),
    ],
)
def test_an_error_is_one_sentence(arguments: tuple[str, ...], said: str, paceline: Shell, tmp_path: Path) -> None:
    out = () if "--out" in arguments else ("--out", str(tmp_path / "x"))
    run = paceline(*QUICK, *out, *arguments)
    assert run.code == 2, run.err
    assert said in run.err
    assert run.err.count("\n") == 1
    assert "Traceback" not in run.err


def test_a_file_without_a_network_is_refused_before_the_run(paceline: Shell, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a network")
    run = paceline("simulate", "rlp-10", "-p", f"rlp:network={path}")
    assert run.code == 2
    assert run.err.startswith("rlp: ")
    assert run.err.count("\n") == 1
