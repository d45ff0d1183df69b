"""The learner: a seed determines the network, also after an interruption, and the network learns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from paceline.policies import make
from paceline.rlp.features import StateFeatures
from paceline.rlp.instance import Instance, drawn, drawn_hundred, unseen
from paceline.rlp.learner import LearnerSettings, RuleLearner
from paceline.rlp.learner_file import LearnerFileError, export, load_learner, save_learner
from paceline.rlp.pretraining import learned
from paceline.workloads.data import load

DIGITS = load("digits")
SMALL = LearnerSettings(
    instances=4, times=8, greedy=2, budget=60, fits=20, batch=64, kept=2, depths=(0, 1), size="bundled", workers=(4,)
)


def weights(learner: RuleLearner) -> torch.Tensor:
    return torch.cat([each.flatten() for each in learner.network.state_dict().values()])


def test_a_seed_determines_the_network(tmp_path: Path) -> None:
    one, log = learned(SMALL, DIGITS, 64, tmp_path / "a")
    again, same = learned(SMALL, DIGITS, 64, tmp_path / "b")
    assert torch.equal(weights(one), weights(again))
    assert log == same
    assert [each.episodes for each in log] == [32, 64]
    other, _ = learned(replace(SMALL, seed=1), DIGITS, 64, tmp_path / "c")
    assert not torch.equal(weights(one), weights(other))


@pytest.mark.slow
def test_a_resumed_learner_learns_what_an_uninterrupted_one_learns(tmp_path: Path) -> None:
    whole, log = learned(SMALL, DIGITS, 160, tmp_path / "whole")
    learned(SMALL, DIGITS, 64, tmp_path / "part")
    resumed, rest = learned(replace(SMALL, seed=99), DIGITS, 160, tmp_path / "part", resume=True)
    assert resumed.settings == SMALL, "the settings of the checkpoint hold"
    assert torch.equal(weights(whole), weights(resumed))
    assert rest == log


def test_instances_may_have_different_numbers_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[tuple[int, int]] = []

    def recorded(seed: int, workers: int, hidden: int, size: str, links: bool) -> Instance:
        played.append((hidden, workers))
        return drawn(seed, workers, hidden, size=size, links=links)

    monkeypatch.setattr("paceline.rlp.learner.drawn", recorded)
    learner, log = learned(replace(SMALL, instances=8, workers=(4, 2)), DIGITS, 64, tmp_path / "kept")
    assert sorted(played) == sorted((hidden, workers) for hidden in (0, 1) for workers in (2, 4) for _ in range(2))
    assert log[-1].episodes == 64
    again, _ = load_learner(tmp_path / "kept", DIGITS)
    assert again.settings == learner.settings


@pytest.mark.slow
def test_several_processes_learn_the_same_as_one(tmp_path: Path) -> None:
    one, _ = learned(SMALL, DIGITS, 64, tmp_path / "one")
    two, _ = learned(SMALL, DIGITS, 64, tmp_path / "two", jobs=2)
    torch.testing.assert_close(weights(one), weights(two), rtol=1e-3, atol=1e-4)


def test_a_learned_network_is_a_policy(tmp_path: Path) -> None:
    for number, state in enumerate((StateFeatures(), StateFeatures(2, False), StateFeatures(validated=True))):
        learner, log = learned(replace(SMALL, state=state, ring=number == 1), DIGITS, 32, tmp_path / "kept")
        out = tmp_path / f"{number}.safetensors"
        export(learner, log, out)
        policy = make(f"rlp:network={out}")
        assert policy.joined(0, 0.0)


@pytest.mark.slow
def test_the_network_learns_the_values_of_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one worker is very slow and nothing else is wrong, it learns that waiting for all workers is worst."""

    def straggler(seed: int, workers: int, hidden: int, size: str, links: bool) -> Instance:
        sleeps = ((1.0, 8.0, 1.0), *((1.0, 0.1, 0.05),) * (workers - 1))
        return Instance(seed, (1.0,) * workers, sleeps, hidden, 32, rate=0.02, dataset="digits", target=0.75)

    monkeypatch.setattr("paceline.rlp.learner.drawn", straggler)
    settings = replace(SMALL, instances=8, times=16, budget=150, fits=300, batch=512, depths=(0,))
    learner, log = learned(settings, DIGITS, 384, tmp_path / "kept")
    assert log[-1].network < 0.6 * log[-1].fixed["bsp"]
    assert log[-1].network < 1.5 * log[-1].fixed["asp"]
    lessons, *_ = learned(settings, DIGITS, 128, tmp_path / "first")[0].kept
    of_rule = {
        str(rule): float(lessons.worth[lessons.rules == at].mean()) for at, rule in enumerate(learner.settings.rules)
    }
    assert of_rule["asp"] > of_rule["bsp"]


def test_a_broken_checkpoint_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "kept"

    def refused() -> str:
        with pytest.raises(LearnerFileError) as error:
            load_learner(path, DIGITS)
        message = str(error.value)
        assert "--resume" in message
        assert message.count(". ") == 0
        return message

    assert "no checkpoint" in refused()
    path.write_bytes(b"nonsense")
    assert "broken" in refused()
    learner = RuleLearner(SMALL, DIGITS)
    save_learner(learner, [], path)
    whole = path.read_bytes()
    load_learner(path, DIGITS)
    path.write_bytes(whole[: len(whole) // 2])
    assert "broken" in refused()
    path.write_bytes(whole.replace(b'"version":"3"', b'"version":"0"'))
    assert "version" in refused()
    path.write_bytes(whole.replace(b"network.0.weight", b"network.9.weight"))
    assert "whole learner" in refused()
    path.write_bytes(whole.replace(b'\\"kept\\": 2', b'\\"kepT\\": 2'))
    assert "whole learner" in refused()


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "mine.safetensors"
    command = [sys.executable, "-m", "paceline", "policies", "learn", "--size", "bundled", "--instances", "4"]
    command += ["--jobs", "2", "--episodes", "1000000", "--budget", "50", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment)
    kept = tmp_path / "mine.safetensors.checkpoint"
    began = time.monotonic()
    while not kept.exists() and time.monotonic() - began < 240:
        assert process.poll() is None
        time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert "--resume" in printed
    assert "Traceback" not in printed
    learner, log = load_learner(kept, DIGITS)
    assert learner.iteration == len(log) >= 1


def test_nothing_is_learned_from_the_unseen_instances() -> None:
    judged_by = {instance.seed for hundred in (1, 2, 3) for instance in unseen(hundred)}
    judged_by |= {instance.seed for seed in range(20) for instance in drawn_hundred(seed)}
    for seed in range(3):
        learner = RuleLearner(replace(SMALL, seed=seed), DIGITS)
        played = {instance.seed for _, instances in learner._parts() for instance in instances}
        assert played
        assert not played & judged_by
