"""`paceline learn`: real training on a simulated cluster, from the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from paceline import cli


def learn(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run it in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["paceline", "learn", *(str(each) for each in arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0) if not isinstance(ended.value.code, str) else 1


def test_a_table_with_what_was_reached(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code = learn(monkeypatch, "r2sp-a-alexnet", "-p", "bsp,r2sp", "--rate", 0.04, "--loss", 0.9, "--rounds", 40)
    said = " ".join(capsys.readouterr().out.split())
    assert code == 0
    assert "mlp on digits, r2sp-a-alexnet" in said and "s to loss 0.9" in said
    assert "not reached" not in said


def test_json_and_what_was_not_reached(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("r2sp-a-alexnet", "-p", "bsp", "--rounds", 3, "--samples", 500)
    assert learn(monkeypatch, *common, "--loss", 0.01, "--json") == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["policy"], run["ended"], run["reached"], len(run["curve"])) == ("bsp", "rounds", None, 3)
    assert run["best"] == min(point["loss"] for point in run["curve"])
    assert learn(monkeypatch, *common, "--accuracy", 0.99) == 0
    assert "not reached" in capsys.readouterr().out
    assert learn(monkeypatch, *common, "--rate", 1e6, "--loss", 0.1, "--json") == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["ended"], run["reached"]) == ("diverged", None)


def test_a_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "loss.png"
    assert learn(monkeypatch, "r2sp-a-alexnet", "-p", "bsp", "--rounds", 2, "--plot", picture) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere"),
        (["r2sp-a-alexnet", "-p", "r2ps"], "r2sp"),
        (["r2sp-a-alexnet", "--network", "mpl"], "did you mean 'mlp'?"),
        (["r2sp-a-alexnet", "--dataset", "digit"], "digits"),
        (["r2sp-a-alexnet", "--dataset", "cifar10", "--data", "/nowhere"], "/nowhere"),
        (["r2sp-a-alexnet", "--optimizer", "Adm"], "torch.optim has no optimizer 'Adm'"),
        (["r2sp-a-alexnet", "--correct", "ful"], "auto, none, predict, round or full"),
        (["r2sp-a-alexnet", "--correct", "full", "--optimizer", "RMSprop"], "RMSprop"),
        (["r2sp-a-alexnet", "--device", "abacus"], "no device 'abacus'"),
        (["r2sp-a-alexnet", "--loss", "1", "--accuracy", "1"], "not both"),
        (["r2sp-a-alexnet", "--network", "vgg16"], "vgg16"),
    ],
)
def test_mistakes_are_said_in_a_sentence(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert learn(monkeypatch, *arguments) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert said in words and "Traceback" not in words
    assert words.endswith(".")


def test_interrupted_it_shows_how_far_it_came(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.simulate.training import Training

    apply = Training.apply

    def interrupted(self: Training, *arguments: Any) -> None:
        if self.version >= 4:
            raise KeyboardInterrupt
        apply(self, *arguments)

    monkeypatch.setattr(Training, "apply", interrupted)
    assert learn(monkeypatch, "r2sp-a-alexnet", "-p", "bsp,r2sp", "--rounds", 50) == 130
    heard = capsys.readouterr()
    assert "bsp" in heard.out and "r2sp " not in heard.out
    assert "how far it came" in heard.err and "nothing was written" not in heard.err
