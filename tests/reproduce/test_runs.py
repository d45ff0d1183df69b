"""Runs are done once, shared where their order is, timed each, and kept."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

from paceline.reproduce.shared import runs as module
from paceline.reproduce.shared.compare import Scheme, at_own_best, at_rate, measured
from paceline.reproduce.shared.runs import Run, Runs, Trained, TrainingCurve, key_of
from paceline.simulate.task import Goal

LIKE = Run("lab-5mb", "bsp", "mlp", "digits", 0.01, 30, goal=Goal("loss", 0.8))
GOAL = Goal("loss", 1.0, hold=3)


def replaced(run: Run = LIKE, **changes: Any) -> Run:
    return msgspec.structs.replace(run, **changes)


@pytest.fixture
def trained_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []
    learn = module.learn

    def counted(run: Run, *arguments: Any, **options: Any) -> TrainingCurve:
        done.append(run.policy)
        return learn(run, *arguments, **options)

    monkeypatch.setattr(module, "learn", counted)
    return done


def test_what_has_the_same_order_is_trained_once_and_timed_each(trained_runs: list[str]) -> None:
    plain, piped, jittered = replaced(), replaced(policy="bsp:pipeline=true"), replaced(jitter=0.2)
    found = Runs()([plain, piped, jittered])
    assert trained_runs == ["bsp"]
    losses = {each.learned.loss for each in found.values()}
    assert len(losses) == 1
    rounds = found[plain].reaches(GOAL)
    assert rounds is not None and rounds == found[piped].reaches(GOAL)
    assert found[plain].seconds[rounds] > 1.5 * found[piped].seconds[rounds]
    assert found[jittered].seconds[rounds] != found[plain].seconds[rounds]


def test_times_are_those_of_a_run_that_was_not_shared() -> None:
    from paceline.policies import make
    from paceline.simulate.training import train
    from paceline.workloads.data import load

    run = replaced(policy="r2sp", jitter=0.1, seed=1, goal=None)
    found = Runs()([run])[run]
    outcome = train(run.spec(), make("r2sp"), run.task(load("digits"), "cpu"), rounds=30)
    assert found.seconds == pytest.approx([point.seconds for point in outcome.curve])
    assert found.learned.loss == pytest.approx([point.loss for point in outcome.curve], rel=1e-3)


def test_kept_runs_are_not_done_again(tmp_path: Path, trained_runs: list[str]) -> None:
    kept = tmp_path / "kept.jsonl"
    wanted = [replaced(), replaced(policy="r2sp")]
    first = Runs(kept=kept)(wanted)
    again = Runs(kept=kept)(wanted)
    assert trained_runs == ["bsp", "r2sp"]
    assert first == again
    kept.write_bytes(kept.read_bytes()[:-40])  # interrupted while it was written
    assert Runs(kept=kept)(wanted) == first
    assert trained_runs == ["bsp", "r2sp", "r2sp"]


@pytest.mark.slow
def test_several_at_a_time_come_to_the_same_and_finish_what_they_have_begun(tmp_path: Path) -> None:
    said: list[int] = []
    over = False
    wanted = [replaced(policy=policy, rounds=4) for policy in ("bsp", "r2sp", "asp")]
    many = [replaced(rounds=2, seed=seed) for seed in range(12)]
    kept = tmp_path / "kept"
    with closing(Runs(None, "cpu", 2, kept, lambda done, of, what: said.append(done), lambda: over)) as several:
        together = several(wanted)
        assert said == [1, 2, 3]
        over = True
        found = several(many)
        assert 1 <= len(found) < 12 and said[3:] == list(range(1, len(found) + 1))
        assert len(several.left_out) == 12 - len(found)
    assert Runs(kept=kept, stop_at=lambda: True)(many) == found
    alone = Runs()(wanted)
    for run in wanted:
        assert together[run].learned.key == alone[run].learned.key
        assert together[run].learned.loss == pytest.approx(alone[run].learned.loss, rel=1e-3)


def test_everything_it_depends_on_is_in_its_key() -> None:
    changes: list[dict[str, Any]] = [
        {"policy": "r2sp"},
        {"network": "lstm"},
        {"rate": 0.02},
        {"samples": 500},
        {"optimizer": "Adam"},
        {"momentum": 0.9},
        {"correct": "full"},
        {"seed": 1},
        {"goal": Goal("loss", 0.7)},
        {"decay": ((1.0, 0.1),)},
        {"rounds": 31},
        {"precision": "bfloat16"},
    ]
    keys = [key_of(LIKE), *(key_of(replaced(**change)) for change in changes)]
    assert len(set(keys)) == len(keys)
    assert key_of(msgspec.json.decode(msgspec.json.encode(LIKE), type=Run)) == key_of(LIKE)


def test_stopped_it_leaves_out_what_is_missing() -> None:
    assert Runs(stop_at=lambda: True)([LIKE]) == {}


# Comparing


def made(losses: list[float], seed: int = 0, rate: float = 0.01, accuracy: dict[int, float] | None = None) -> Trained:
    samples = tuple(100 * (at + 1) for at in range(len(losses)))
    learned = TrainingCurve("", tuple(losses), samples, accuracy or {}, "rounds", "cpu")
    return Trained(replaced(seed=seed, rate=rate), learned, tuple(float(each) for each in samples), 100.0, 0.0)


def test_a_goal_must_hold() -> None:
    goal = Goal("loss", 1.0, hold=3)
    assert made([3, 0.9, 0.9, 1.1, 1.0, 0.9, 0.8]).reaches(goal) == 6
    assert made([3, 0.9, 0.9, 1.1]).reaches(goal) is None
    assert made([1], accuracy={4: 0.5, 9: 0.7}).reaches(Goal("accuracy", 0.6)) == 9


def test_a_mean_is_of_all_seeds_or_none() -> None:
    goal = Goal("loss", 1.0, hold=1)
    both = measured([made([2, 1, 1]), made([2, 2, 1], seed=1)], Scheme("bsp"), goal)
    assert (both.rounds, both.samples, both.seconds, both.reached) == (2.5, 250, 250, 2)
    one = measured([made([2, 1, 1]), made([2, 2, 1.5], seed=1)], Scheme("bsp"), goal)
    assert (one.rounds, one.seconds, one.reached, one.best) == (None, None, 1, 1)


def test_own_best_is_of_the_rates_given() -> None:
    schemes = (Scheme("bsp"), Scheme("r2sp"))
    rates = (0.0001, 0.01)
    at_best = at_own_best(Runs(), LIKE, schemes, rates, (0,), GOAL)
    assert [(each.scheme.policy, each.rate) for each in at_best] == [("bsp", 0.01), ("r2sp", 0.01)]
    slow = at_rate(Runs(), LIKE, schemes, 0.0001, (0,), GOAL)
    assert all(each.seconds is None and each.best > 1 for each in slow)


def test_of_some_of_the_rates_there_is_no_best(tmp_path: Path) -> None:
    schemes, rates = (Scheme("bsp"), Scheme("r2sp")), (0.0001, 0.01)
    kept = tmp_path / "kept"
    Runs(kept=kept)([*(schemes[0].of(LIKE, rate, 0) for rate in rates), schemes[1].of(LIKE, 0.01, 0)])
    (only,) = at_own_best(Runs(kept=kept, stop_at=lambda: True), LIKE, schemes, rates, (0,), GOAL)
    assert (only.scheme.policy, only.rate) == ("bsp", 0.01)
