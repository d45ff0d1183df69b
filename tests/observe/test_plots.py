"""Plots of a run."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from paceline.observe.observer import Recorder
from paceline.observe.plots import MAX_WORKERS, Panel, draw, intervals
from paceline.observe.trace import (
    Arrived,
    Computed,
    Event,
    Granted,
    Joined,
    Left,
    Pulled,
    Pulling,
    Pushing,
    Turned,
    Used,
)
from paceline.policies import make
from paceline.simulate import Cluster, load_cluster

TRACE: list[Event] = [
    Joined(0, 0),
    Granted(0, 0, None, 0),
    Joined(0, 1),
    Granted(0, 1, None, 0),
    Pulling(1, 0),
    Pulling(2, 1),
    Pulled(3, 0, 0),
    Pulled(4, 1, 0),
    Computed(6, 0),
    Turned(7, 0),
    Pushing(7, 0),
    Computed(8, 1),
    Left(9, 1),
    Arrived(10, 0, 1, 32),
    Used(12, "in", 0.0),
]


def panel_of(events: list[Event]) -> Panel:
    panel = Panel("test", 2, iteration_seconds=5.0)
    panel.events.extend(events)
    return panel


def test_the_activities_of_each_worker() -> None:
    start, done = intervals(panel_of(TRACE), seconds=100.0)
    assert start == 0.0
    assert done[0] == [
        (0, 1, "waiting"),
        (1, 3, "pulling"),
        (3, 6, "computing"),
        (6, 7, "waiting"),
        (7, 10, "pushing"),
        (10, 12, "waiting"),
    ]
    assert done[1] == [(0, 2, "waiting"), (2, 4, "pulling"), (4, 8, "computing"), (8, 9, "waiting")]


def test_only_the_end_of_the_run_is_shown() -> None:
    start, done = intervals(panel_of(TRACE), seconds=7.0)
    assert start == 5.0
    assert done[0] == [(0, 1, "computing"), (1, 2, "waiting"), (2, 5, "pushing"), (5, 7, "waiting")]
    assert done[1] == [(0, 3, "computing"), (3, 4, "waiting")]


def test_an_empty_panel() -> None:
    assert intervals(panel_of([]), 10.0) == (0.0, {})


def test_a_panel_keeps_a_bounded_number_of_events() -> None:
    panel = Panel("test", workers=3)
    for time in range(10_000):
        panel.events.append(Used(time, "in", 0.5))
    assert len(panel.events) == 300
    assert panel.events[-1].time == 9999


def test_the_activities_of_a_run_do_not_overlap() -> None:
    panel = Panel("r2sp", 8)
    report = Cluster(load_cluster("r2sp-b"), make("r2sp"), 12, observer=Recorder(panel.events.append)).run().report
    seconds = 2.5 * report.mean_iteration_seconds
    _, done = intervals(panel, seconds)
    assert done.keys() == set(range(8))
    for spans in done.values():
        assert spans[0][0] == 0.0
        assert spans[-1][1] == pytest.approx(seconds)
        for (_, until, what), (since, _, then) in pairwise(spans):
            assert until == since
            assert what != then or what == "waiting"


@pytest.mark.parametrize("policies", [["bsp"], ["bsp", "r2sp"]])
def test_draw_writes_a_png_file(tmp_path: Path, policies: list[str]) -> None:
    pytest.importorskip("matplotlib")
    panels = []
    for policy in policies:
        panel = Panel(policy, 8)
        result = Cluster(load_cluster("r2sp-b"), make(policy), 8, observer=Recorder(panel.events.append)).run()
        panel.iteration_seconds = result.report.mean_iteration_seconds
        panels.append(panel)
    path = tmp_path / "picture.part"
    draw(panels, path)
    written = path.read_bytes()
    assert written.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(written) > 10_000
    width, height = (int.from_bytes(written[i : i + 4], "big") for i in (16, 20))
    assert width > 1000
    assert height > 300 * len(policies)


def test_more_workers_than_can_be_shown(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    panel = Panel("many", MAX_WORKERS + 10, iteration_seconds=1.0)
    for worker in range(MAX_WORKERS + 10):
        panel.events += [Pulled(0.0, worker, 0), Computed(1.0, worker)]
    draw([panel], tmp_path / "many.png")
    assert (tmp_path / "many.png").stat().st_size > 10_000
