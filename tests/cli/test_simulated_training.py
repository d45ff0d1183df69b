"""`paceline simulate --train`: real gradients in virtual time, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from paceline.simulate.training import Training
from shell import Shell


@pytest.fixture
def train(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(tmp_path, capsys, monkeypatch, ("simulate", "--train", "mlp"))


def test_the_table_shows_the_goals_that_were_reached(train: Shell) -> None:
    ended = train("r2sp-a-alexnet", "-p", "bsp,r2sp", "--rate", 0.04, "--loss", 0.9, "--rounds", 40)
    said = " ".join(ended.out.split())
    assert ended.code == 0
    assert "mlp on digits, r2sp-a-alexnet" in said and "s to loss 0.9" in said
    assert "not reached" not in said


def test_json_names_the_goals_that_were_not_reached(train: Shell) -> None:
    common = ("r2sp-a-alexnet", "-p", "bsp", "--rounds", 3, "--samples", 500)
    (run,) = json.loads(train(*common, "--loss", 0.01, "--json").out)["runs"]
    assert (run["policy"], run["ended"], run["reached"], len(run["curve"])) == ("bsp", "rounds", None, 3)
    told = json.loads(train(*common, "--optimizer", "Adam", "--rate", 0.002, "--json").out)
    assert (told["network"], told["dataset"], told["samples"], told["optimizer"]) == ("mlp", "digits", 500, "Adam")
    assert (told["settings"], told["correct"]) == ({"lr": 0.002}, "auto")
    assert run["best"] == min(point["loss"] for point in run["curve"])
    short = train(*common, "--accuracy", 0.99)
    assert short.code == 0 and "not reached" in short.out
    (run,) = json.loads(train(*common, "--rate", 1e6, "--loss", 0.1, "--json").out)["runs"]
    assert (run["ended"], run["reached"]) == ("diverged", None)


def test_the_best_accuracy_is_reported(train: Shell) -> None:
    common = ("r2sp-a-alexnet", "-p", "bsp", "--rounds", 10, "--accuracy", 0.999)
    (run,) = json.loads(train(*common, "--json").out)["runs"]
    tested = [point["accuracy"] for point in run["curve"] if point["accuracy"] is not None]
    assert len(tested) == 2 and run["best"] == max(tested)


def test_the_plot_is_a_png(train: Shell) -> None:
    pytest.importorskip("matplotlib")
    assert train("r2sp-a-alexnet", "-p", "bsp", "--rounds", 2, "--plot", "loss.png").code == 0
    assert train.files() == {"loss.png"}
    assert (train.folder / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere"),
        (["r2sp-a-alexnet", "-p", "r2ps"], "r2sp"),
        (["r2sp-a-alexnet", "--train", "mpl"], "Did you mean 'mlp'?"),
        (["r2sp-a-alexnet", "--dataset", "digit"], "digits"),
        (["r2sp-a-alexnet", "--dataset", "cifar10", "--data", "/nowhere"], "/nowhere"),
        (["r2sp-a-alexnet", "--optimizer", "Adm"], "torch.optim has no optimizer 'Adm'"),
        (["r2sp-a-alexnet", "--correct", "ful"], "auto, none, predict, round or full"),
        (["r2sp-a-alexnet", "--correct", "full", "--optimizer", "RMSprop"], "RMSprop"),
        (["r2sp-a-alexnet", "--device", "abacus"], "no device 'abacus'"),
        (["r2sp-a-alexnet", "--precision", "half"], "choose float32 or bfloat16"),
        (["r2sp-a-alexnet", "--precision", "bfloat16"], "bfloat16 needs --device cuda"),
        (["r2sp-a-alexnet", "--loss", "1", "--accuracy", "1"], "not both"),
        (["r2sp-a-alexnet", "--accuracy", "90"], "at most 1; got 90"),
        (["r2sp-a-alexnet", "--loss", "-1"], "greater than 0; got -1"),
        (["r2sp-a-alexnet", "--samples", "3"], "3 samples for 16 workers"),
        (["r2sp-a-alexnet", "--train", "vgg16"], "vgg16"),
        (["r2sp-a-alexnet", "--faults", "3"], "--faults cannot be combined with --train."),
        (["r2sp-a-alexnet", "--apply", "streamed"], "--apply cannot be combined with --train."),
    ],
)
def test_an_error_is_one_sentence(arguments: list[str], said: str, train: Shell) -> None:
    ended = train(*arguments)
    words = " ".join(ended.err.split())
    assert ended.code == 2
    assert said in words and "Traceback" not in words
    assert words.endswith(".")


def test_a_short_run_has_an_iteration_time(train: Shell) -> None:
    """A run that ends within its warm-up reports the mean over the whole run."""
    ended = train("r2sp-a-alexnet", "-p", "bsp", "--budget", 8)
    assert ended.out.split("bsp", 1)[1].split()[:2] == ["3.387", "2"]  # to the last arrival
    (run,) = json.loads(train("r2sp-a-alexnet", "-p", "bsp", "--budget", 8, "--json").out)["runs"]
    assert run["report"]["mean_iteration_seconds"] == pytest.approx(3.39, abs=0.01)
    nothing = train("r2sp-a-alexnet", "-p", "bsp", "--budget", 0.5)
    assert "give a larger --budget" in nothing.err
    assert nothing.out.split("bsp", 1)[1].split()[:3] == ["–", "0", "–"]


def test_ctrl_c_shows_the_results_so_far(train: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = Training.apply

    def interrupted(self: Training, *arguments: Any) -> None:
        if self.version >= 4:
            raise KeyboardInterrupt
        apply(self, *arguments)

    monkeypatch.setattr(Training, "apply", interrupted)
    ended = train("r2sp-a-alexnet", "-p", "bsp,r2sp", "--rounds", 50)
    assert ended.code == 130
    assert "bsp" in ended.out and "r2sp " not in ended.out
    assert "The results so far are shown" in ended.err and "nothing was written" not in ended.err
