"""The whole recipe: times to an accuracy and final accuracies, like with like."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("torch")

from paceline.reproduce.r2sp import recipe
from paceline.reproduce.shared.accuracy import AccuracyCase
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.runs import LATER_SETTINGS, Run, Runs, key_of
from reproduce.conftest import one_thread  # noqa: F401


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    template = recipe._run("mlp", "digits", 1437, 8, 2, 0.4, augment=False)
    chosen = AccuracyCase("MLP", template, (0.5, 0.999))
    monkeypatch.setattr(recipe, "_recipe", lambda request: chosen)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_the_recipe_compares_times_and_final_accuracies() -> None:
    figure = recipe.recipe(Request(Runs(), quick=True))
    assert not figure.missing
    rows = {(row.what, row.unit): row for row in figure.rows}
    for scheme in recipe.SCHEMES:
        assert rows[f"MLP: {scheme.name}, final test accuracy", "%"].ours is not None
        missed = rows[f"MLP: {scheme.name}, time to 100%", "s"]
        assert missed.ours is None and missed.note.startswith("0 of 1 seeds; the best was 0.")
    base = rows[f"MLP: {recipe.BSP.name}, time to 50%", "× as fast as BSP"]
    assert base.ours == 1.0
    pipelined = rows["MLP: bsp:pipeline=true,weights=mean, time to 50%", "× as fast as BSP"]
    assert isinstance(pipelined.ours, float) and pipelined.ours > 1.3  # the same training, and shorter iterations


def test_the_full_recipe_is_the_usual_one() -> None:
    run = recipe._run("resnet20", "cifar10", 50_000, 60, 49, 0.4, augment=True)
    task_rates = [run.rate * factor for factor in _factors(run, (0, 1, 2, 29, 30, 44, 45, 59))]
    assert task_rates == pytest.approx([0.04, 0.2, 0.4, 0.4, 0.04, 0.04, 0.004, 0.004])
    assert (run.momentum, run.weight_decay, run.augment) == (0.9, 5e-4, True)
    assert run.rounds == 60 * 50_000 // 512


def _factors(run: Run, epochs: tuple[int, ...]) -> list[float]:
    found = []
    for epoch in epochs:
        factor = 1.0
        for since, times in run.decay:
            factor *= times if epoch >= since else 1.0
        found.append(factor)
    return found


def test_results_that_were_kept_before_a_setting_existed_stay_valid() -> None:
    run = Run("lab-1mb", "bsp", "mlp", "digits", 0.1, 3)
    assert not LATER_SETTINGS.keys() & msgspec.json.decode(key_of(run)).keys()
    for name, value in (("weight_decay", 0.1), ("augment", True)):
        changed = msgspec.structs.replace(run, **{name: value})
        assert msgspec.json.decode(key_of(changed))[name] == value
