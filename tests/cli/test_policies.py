"""`paceline rlp learn`: what it says, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")


import threads
from paceline.rlp.features import StateFeatures
from paceline.rlp.network_file import load
from paceline.rlp.rules import ACTIONS
from shell import Shell

QUICK = ("rlp", "learn", "--size", "bundled", "--instances", "4", "--budget", "20", "--jobs", "1")


one_thread = pytest.fixture(autouse=True)(threads.one_thread)


@pytest.fixture
def paceline(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(tmp_path, capsys, monkeypatch)


def test_it_learns_and_what_it_learned_is_a_policy(paceline: Shell, tmp_path: Path) -> None:
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
    assert more.err.count("episodes: the network") == 1, "only what is new is played"


def test_what_the_network_is_shown_can_be_chosen(paceline: Shell, tmp_path: Path) -> None:
    out = tmp_path / "bare.safetensors"
    shown = ("--no-scene", "--history", "2", "--validated", "--workers", "3,2")
    run = paceline(*QUICK, "--episodes", "64", "--out", str(out), *shown)
    assert run.code == 0, run.err
    assert load(str(out)).state == StateFeatures(history=2, scene=False, validated=True)


def test_it_learns_as_the_paper_does(paceline: Shell, tmp_path: Path) -> None:
    out = tmp_path / "paper.safetensors"
    run = paceline(*QUICK, "--paper", "--no-pretrained", "--episodes", "32", "--out", str(out))
    assert run.code == 0, run.err
    assert "32 episodes" in run.err
    assert paceline("simulate", "rlp-10", "-p", f"rlp:network={out}", "--iterations", "12").code == 0


def test_what_the_paper_learned_until_ctrl_c_is_kept(
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
        (("--paper", "--resume"), "--paper keeps no checkpoint"),
        (("--workers", "4,x"), "--workers: '4,x' is not numbers from 1 on"),
        (("--workers", "0"), "--workers: '0' is not numbers from 1 on"),
        (("--size", "giant"), "There is no size 'giant'; say whole, small, tiny, bundled."),
        (("--out", "/nowhere/at/all"), "--out: '/nowhere/at/all' cannot be written"),
        (("--resume",), "leave out --resume to begin"),
        (("--device", "abacus"), "There is no device 'abacus'"),
        (("--size", "tiny", "--data", "/nowhere"), "which is not a folder"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    arguments: tuple[str, ...], said: str, paceline: Shell, tmp_path: Path
) -> None:
    out = () if "--out" in arguments else ("--out", str(tmp_path / "x"))
    run = paceline(*QUICK, *out, *arguments)
    assert run.code == 2, run.err
    assert said in run.err
    assert run.err.count("\n") == 1
    assert "Traceback" not in run.err


def test_a_file_that_is_no_network_is_refused_before_anything_runs(paceline: Shell, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a network")
    run = paceline("simulate", "rlp-10", "-p", f"rlp:network={path}")
    assert run.code == 2
    assert run.err.startswith("rlp: ")
    assert run.err.count("\n") == 1
