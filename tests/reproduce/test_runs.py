"""Trainings are carried out once, shared by runs with the same order of updates, and kept in a file."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

from paceline.policies import make
from paceline.reproduce.shared import runs as module
from paceline.reproduce.shared.compare import Scheme, at_own_best, at_rate, measured
from paceline.reproduce.shared.runs import Run, Runs, Trained, TrainingCurve, key_of
from paceline.simulate.task import Goal
from paceline.simulate.update_schedule import update_schedule

TEMPLATE = Run("lab-5mb", "bsp", "mlp", "digits", 0.01, 30, goal=Goal("loss", 0.8))
GOAL = Goal("loss", 1.0, hold=3)


def replaced(run: Run = TEMPLATE, **changes: Any) -> Run:
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


def test_runs_with_the_same_order_are_trained_once_and_timed_separately(trained_runs: list[str]) -> None:
    plain, piped, jittered = replaced(), replaced(policy="bsp:pipeline=true"), replaced(jitter=0.2)
    found = Runs()([plain, piped, jittered])
    assert trained_runs == ["bsp"]
    losses = {each.learned.loss for each in found.values()}
    assert len(losses) == 1
    rounds = found[plain].reaches(GOAL)
    assert rounds is not None and rounds == found[piped].reaches(GOAL)
    assert found[plain].seconds[rounds] > 1.5 * found[piped].seconds[rounds]
    assert found[jittered].seconds[rounds] != found[plain].seconds[rounds]


def test_times_equal_those_of_an_unshared_run() -> None:
    from paceline.policies import make
    from paceline.simulate.training import train
    from paceline.workloads.data import load

    run = replaced(policy="r2sp", jitter=0.1, seed=1, goal=None)
    found = Runs()([run])[run]
    outcome = train(run.spec(), make("r2sp"), run.task(load("digits"), "cpu"), rounds=30)
    assert found.seconds == pytest.approx([point.seconds for point in outcome.curve])
    assert found.learned.loss == pytest.approx([point.loss for point in outcome.curve], rel=1e-3)


def test_kept_runs_are_not_repeated(tmp_path: Path, trained_runs: list[str]) -> None:
    kept = tmp_path / "kept.jsonl"
    wanted = [replaced(), replaced(policy="r2sp")]
    first = Runs(kept=kept)(wanted)
    again = Runs(kept=kept)(wanted)
    assert trained_runs == ["bsp", "r2sp"]
    assert first == again
    kept.write_bytes(kept.read_bytes()[:-40])  # as if writing had been interrupted
    assert Runs(kept=kept)(wanted) == first
    assert trained_runs == ["bsp", "r2sp", "r2sp"]


@pytest.mark.slow
def test_parallel_runs_give_the_same_results_and_finish_once_begun(tmp_path: Path) -> None:
    progress: list[int] = []
    stop = False
    wanted = [replaced(policy=policy, rounds=4) for policy in ("bsp", "r2sp", "asp")]
    many = [replaced(rounds=2, seed=seed) for seed in range(12)]
    kept = tmp_path / "kept"
    with closing(Runs(None, "cpu", 2, kept, lambda done, total, what: progress.append(done), lambda: stop)) as several:
        together = several(wanted)
        assert progress == [1, 2, 3]
        stop = True
        found = several(many)
        assert 1 <= len(found) < 12 and progress[3:] == list(range(1, len(found) + 1))
        assert len(several.left_out) == 12 - len(found)
    assert Runs(kept=kept, stop_at=lambda: True)(many) == found
    alone = Runs()(wanted)
    for run in wanted:
        assert together[run].learned.key == alone[run].learned.key
        assert together[run].learned.loss == pytest.approx(alone[run].learned.loss, rel=1e-3)


def test_the_key_holds_everything_that_a_training_depends_on() -> None:
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
    keys = [key_of(TEMPLATE), *(key_of(replaced(**change)) for change in changes)]
    assert len(set(keys)) == len(keys)
    assert key_of(msgspec.json.decode(msgspec.json.encode(TEMPLATE), type=Run)) == key_of(TEMPLATE)


def test_missing_runs_are_left_out_after_a_stop() -> None:
    assert Runs(stop_at=lambda: True)([TEMPLATE]) == {}


# Comparing


def made(losses: list[float], seed: int = 0, rate: float = 0.01, accuracy: dict[int, float] | None = None) -> Trained:
    samples = tuple(100 * (at + 1) for at in range(len(losses)))
    learned = TrainingCurve("", tuple(losses), samples, accuracy or {}, "rounds", "cpu")
    return Trained(replaced(seed=seed, rate=rate), learned, tuple(float(each) for each in samples), 100.0, 0.0)


def test_a_loss_goal_must_hold_for_several_rounds() -> None:
    goal = Goal("loss", 1.0, hold=3)
    assert made([3, 0.9, 0.9, 1.1, 1.0, 0.9, 0.8]).reaches(goal) == 6
    assert made([3, 0.9, 0.9, 1.1]).reaches(goal) is None
    assert made([1], accuracy={4: 0.5, 9: 0.7}).reaches(Goal("accuracy", 0.6)) == 9


def test_a_mean_needs_all_seeds() -> None:
    goal = Goal("loss", 1.0, hold=1)
    both = measured([made([2, 1, 1]), made([2, 2, 1], seed=1)], Scheme("bsp"), goal)
    assert (both.rounds, both.samples, both.seconds, both.reached) == (2.5, 250, 250, 2)
    one = measured([made([2, 1, 1]), made([2, 2, 1.5], seed=1)], Scheme("bsp"), goal)
    assert (one.rounds, one.seconds, one.reached, one.best) == (None, None, 1, 1)


@pytest.mark.slow
def test_the_best_rate_is_one_of_those_given(tmp_path: Path) -> None:
    schemes = (Scheme("bsp"), Scheme("r2sp"))
    rates = (0.0001, 0.01)
    runs = Runs(kept=tmp_path / "kept")
    at_best = at_own_best(runs, TEMPLATE, schemes, rates, (0,), GOAL)
    assert [(each.scheme.policy, each.rate) for each in at_best] == [("bsp", 0.01), ("r2sp", 0.01)]
    slow = at_rate(runs, TEMPLATE, schemes, 0.0001, (0,), GOAL)
    assert all(each.seconds is None and each.best > 1 for each in slow)


@pytest.mark.slow
def test_the_rate_of_an_adaptive_optimizer_is_that_of_a_step() -> None:
    """BSP applies all updates of a round in one step. With weights=sum, each of them has its share of the rate."""
    template = replaced(optimizer="Adam", rounds=5)
    workers = len(template.spec().workers)
    schemes = (Scheme("bsp"), Scheme("r2sp:groups=2"), Scheme("r2sp"))
    rates = (0.002, 0.001)
    for each, updates in zip(
        at_own_best(Runs(), template, schemes, rates, (0, 1), GOAL), (workers, workers / 2, 1), strict=True
    ):
        assert each.rate in [pytest.approx(rate / updates) for rate in rates]
        assert each.seeds == 2  # and not two rates of one scheme


@pytest.mark.slow
def test_a_scheme_without_all_rates_has_no_best_rate(tmp_path: Path) -> None:
    schemes, rates = (Scheme("bsp"), Scheme("r2sp")), (0.0001, 0.01)
    kept = tmp_path / "kept"
    Runs(kept=kept)([*(schemes[0].of(TEMPLATE, rate, 0) for rate in rates), schemes[1].of(TEMPLATE, 0.01, 0)])
    (only,) = at_own_best(Runs(kept=kept, stop_at=lambda: True), TEMPLATE, schemes, rates, (0,), GOAL)
    assert (only.scheme.policy, only.rate) == ("bsp", 0.01)


def test_a_cluster_with_its_own_jitter_is_timed_with_the_seed_of_the_training() -> None:
    """Times and the order of updates were those of seed 0, whatever the seed of the training."""
    runs = [Run("dssp-homogeneous-alexnet", "asp", "mlp", "digits", 0.1, 20, seed=seed) for seed in (0, 1)]
    planned = [run.schedule() for run in runs]
    assert planned[0].order != planned[1].order
    assert planned[1].order == update_schedule(runs[1].spec(), make("asp"), 20, seed=1).order
