"""Metrics over time: when one reached a target, which policy was sooner, and the plot of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.observe import metric_history
from paceline.observe.metric_history import MetricHistory, Target, verdicts

TARGET = Target("accuracy", 0.97)


def test_times_begin_when_the_first_worker_joins() -> None:
    history = MetricHistory()
    history.joined(10.0, 1)
    history.joined(12.0, 0)
    history.measured(15.0, 0, "accuracy", 0.5)
    history.measured(16.0, 0, "val_loss", 2.0)
    history.measured(20.0, 1, "accuracy", 0.98)
    assert history.curves == {"accuracy": [(5.0, 0.5), (10.0, 0.98)], "val_loss": [(6.0, 2.0)]}
    assert history.last("accuracy") == 0.98
    assert history.last("speed") is None


def test_a_metric_that_is_reported_very_often_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_history, "MAX_POINTS", 8)
    history = MetricHistory()
    for number in range(1000):
        history.measured(float(number), 0, "accuracy", number / 1000)
        assert len(history.curves["accuracy"]) <= 8
    points = history.curves["accuracy"]
    assert points[0] == (0.0, 0.0) and points[-1] == (999.0, 0.999)
    assert points == sorted(points)


@pytest.mark.parametrize(
    ("text", "target", "words"),
    [
        ("accuracy=0.97", TARGET, "97%"),
        ("accuracy=0.975", Target("accuracy", 0.975), "97.5%"),
        ("accuracy=97", Target("accuracy", 97.0), "accuracy 97"),
        ("val_loss<0.1", Target("val_loss", 0.1, falls=True), "val_loss 0.1"),
        ("reward=-5e2", Target("reward", -500.0), "reward -500"),
    ],
)
def test_a_target_is_read_and_named(text: str, target: Target, words: str) -> None:
    assert Target.parse(text) == target
    assert str(target) == words


@pytest.mark.parametrize(
    "text", ["", "accuracy", "=0.9", "accuracy=", "accuracy=high", "accuracy=nan", "a b=1", "a==1"]
)
def test_other_texts_are_not_targets(text: str) -> None:
    with pytest.raises(ValueError):
        Target.parse(text)


def test_the_first_time_at_the_target_counts() -> None:
    curves = {"accuracy": [(1.0, 0.5), (2.0, 0.97), (3.0, 0.9), (4.0, 0.99)], "val_loss": [(1.0, 3.0), (2.0, 0.2)]}
    assert TARGET.seconds(curves) == 2.0
    assert Target("val_loss", 0.2, falls=True).seconds(curves) == 2.0
    assert Target("val_loss", 0.1, falls=True).seconds(curves) is None
    assert Target("reward", 1.0).seconds(curves) is None


def test_sentences_compare_with_the_first_policy() -> None:
    times = [("bsp", 20.0), ("r2sp", 10.0), ("ssp", 30.0), ("asp", None), ("dssp", 20.5)]
    assert verdicts(times, TARGET) == [
        "r2sp reached 97% 2.0 × sooner than bsp.",
        "ssp reached 97% 1.5 × later than bsp.",
        "asp never reached 97%.",
        "dssp reached 97% as soon as bsp.",
    ]
    assert verdicts([("bsp", None), ("r2sp", 10.0), ("asp", None)], TARGET) == [
        "bsp never reached 97%.",
        "r2sp reached 97% after 10.0 s.",
        "asp never reached 97%.",
    ]
    assert verdicts([("bsp", 0.0), ("r2sp", 0.0)], TARGET) == ["r2sp reached 97% as soon as bsp."]


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_a_plot_has_a_line_for_each_policy_and_the_times(ending: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from paceline.observe.metric_plot import draw_metric

    curves = {"bsp": [(1.0, 0.5), (20.4, 0.98)], "r2sp": [(1.0, 0.6), (8.3, 0.97), (9.0, 0.96)], "asp": [(1.0, 0.1)]}
    path = tmp_path / f"plot{ending}"
    draw_metric(curves, "accuracy", TARGET, "a title", path)
    beginning = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[ending]
    assert path.read_bytes().startswith(beginning)
    if ending == ".svg":
        drawn = path.read_text()
        for text in ("bsp", "r2sp", "asp", "20.4 s", "8.3 s", "97%", "a title"):
            assert f"<!-- {text} -->" in drawn, f"{text} is not in the plot"
