"""The export for ui.perfetto.dev."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from paceline.observe.observer import Recorder, Tee
from paceline.observe.perfetto import LANES, Perfetto, write
from paceline.observe.summary import Report, Summary
from paceline.observe.trace import (
    Applied,
    Arrived,
    Began,
    Cancelled,
    Computed,
    Discarded,
    Event,
    Granted,
    Joined,
    Kept,
    Left,
    Progressed,
    Pulled,
    Pulling,
    Pushing,
    Saved,
    Turned,
    Used,
    identities,
)
from paceline.policies import make, names
from paceline.simulate import Cluster, load_cluster
from paceline.simulate.random_faults import with_random_faults

Line = dict[str, Any]


def parsed(text: str) -> list[Line]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not valid JSON")

    whole = json.loads(text, parse_constant=refuse)
    assert whole.keys() == {"traceEvents"}
    lines: list[Line] = whole["traceEvents"]
    return lines


def written(events: Iterable[Event]) -> list[Line]:
    out = io.StringIO()
    write(events, out)
    return parsed(out.getvalue())


def simulated(policy: str, streamed: bool = False, faults: int = 0) -> tuple[list[Event], Report]:
    """Simulate a run, and return its events and its report without a warm-up."""
    spec = load_cluster("r2sp-b").with_jitter(0.1)
    if faults:
        spec = with_random_faults(spec, count=faults, iterations=8, seed=1)
    events: list[Event] = []
    summary = Summary()
    Cluster(spec, make(policy), 8, streamed=streamed, observer=Tee(Recorder(events.append), summary)).run()
    return events, summary.report()


def slices(lines: list[Line], lane: str | None = None) -> list[Line]:
    return [line for line in lines if line["ph"] == "X" and lane in (None, line["cat"])]


def seconds(lines: list[Line], *lanes: str) -> float:
    return sum(int(line["dur"]) for lane in lanes for line in slices(lines, lane)) / 1e6


def process_names(lines: list[Line]) -> dict[int, str]:
    return {line["pid"]: line["args"]["name"] for line in lines if line["name"] == "process_name"}


def drawn(lines: list[Line], pid: int = 10) -> list[tuple[str, float, float, str]]:
    """Return the lane, the start and end in seconds, and the name of each slice, ordered by time."""
    found = [(line["cat"], line["ts"], line["ts"] + line["dur"], line["name"]) for line in slices(lines)]
    assert {line["pid"] for line in slices(lines)} <= {pid}
    return [(lane, since / 1e6, until / 1e6, name) for lane, since, until, name in sorted(found, key=lambda s: s[1])]


# A small run, by hand


def test_the_slices_of_an_iteration() -> None:
    lines = written(
        [
            Joined(0, 0),
            Granted(0, 0, None, 0),
            Pulling(1, 0),
            Pulled(3, 0, 0),
            Computed(6, 0),
            Turned(7, 0),
            Pushing(7.5, 0),
            Arrived(10, 0, 1, 32, 0.5),
            Applied(11, 1, (0,), (1,), (0,)),
            Granted(12, 0, None, 0),
        ]
    )
    assert drawn(lines) == [
        ("pull", 0, 1, "queued 1"),
        ("pull", 1, 3, "pull 1"),
        ("compute", 3, 6, "compute 1"),
        ("wait", 6, 7, "wait for turn 1"),
        ("push", 7, 7.5, "queued 1"),
        ("push", 7.5, 10, "push 1"),
        ("wait", 10, 12, "wait for grant 1"),
    ]
    for line in slices(lines)[:-1]:
        assert line["args"] == {"iteration": 1, "batch": 32, "loss": 0.5, "staleness": 0, "version": 1}


SERVED: list[Event] = [
    Joined(0, 0),
    Granted(1, 0, None, 0),
    Pulled(5.0, 0, 0),
    Computed(5.001, 0),
    Turned(5.001, 0),
    Arrived(7, 0, 1, 32),
]


def test_a_server_does_not_see_where_a_pull_ends() -> None:
    assert drawn(written(SERVED)) == [("compute", 1, 5.001, "pull and compute 1"), ("push", 5.001, 7, "push 1")]


def test_the_compute_time_that_a_worker_reports_gives_the_end_of_its_pull() -> None:
    reported = [event._replace(seconds=3.0) if isinstance(event, Computed) else event for event in SERVED]
    assert drawn(written(reported)) == [
        ("pull", 1, 2.001, "pull 1"),
        ("compute", 2.001, 5.001, "compute 1"),
        ("push", 5.001, 7, "push 1"),
    ]
    exaggerated = [event._replace(seconds=99.0) if isinstance(event, Computed) else event for event in SERVED]
    assert drawn(written(exaggerated))[0] == ("compute", 1, 5.001, "compute 1"), (
        "computing cannot start before the Grant"
    )


def test_an_iteration_cancelled_at_a_server_is_drawn_as_pull_and_compute() -> None:
    assert drawn(written([*SERVED[:2], Cancelled(4, 0)])) == [("compute", 1, 4, "pull and compute 1")]


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ([Cancelled(4, 0)], {"cancelled": True}),
        ([Left(4, 0)], {"left": True}),
        ([Used(4, "in", 0.0)], {"cut off by the end": True}),
    ],
)
def test_an_abandoned_iteration_is_closed_with_its_reason(ends: list[Event], reason: Line) -> None:
    lines = written([Joined(0, 0), Granted(0, 0, None, 0), Pulling(1, 0), Pulled(3, 0, 0), *ends])
    assert drawn(lines)[-1] == ("compute", 3, 4, "compute 1")
    for line in slices(lines):
        assert line["args"] == {"iteration": 1} | reason


@pytest.mark.parametrize(
    ("event", "decision"),
    [
        (Kept(7, 0, 1, 3), {"kept in": 3}),
        (Discarded(7, 0, 1), {"discarded": True}),
        (Applied(7, 5, (0,), (1,), (4,)), {"version": 5, "staleness": 4}),
        (Used(7, "in", 0.0), {}),
    ],
)
def test_slices_have_the_decision_about_their_update(event: Event, decision: Line) -> None:
    lines = written([*SERVED, event])
    for line in slices(lines):
        assert line["args"] == {"iteration": 1, "batch": 32} | decision


def test_slices_have_the_decision_about_the_update_of_their_incarnation() -> None:
    again = [event._replace(time=event.time + 10) for event in SERVED[1:]]
    again = [event._replace(incarnation=2) if isinstance(event, Arrived) else event for event in again]
    events: list[Event] = [*SERVED, Left(8, 0), Joined(10, 0, 2), *again]
    lines = written([*events, Discarded(17, 0, 1, 2), Applied(17, 5, (0,), (1,), (4,), (1,))])
    for line in slices(lines, "compute") + slices(lines, "push"):
        decision = {"version": 5, "staleness": 4} if line["ts"] < 10_000_000 else {"discarded": True}
        assert line["args"] == {"iteration": 1, "batch": 32} | decision
    assert len(slices(lines, "push")) == 2


def test_the_server_has_a_mark_for_each_apply_and_counters() -> None:
    lines = written(
        [
            *SERVED,
            Joined(0, 1),
            Applied(7, 5, (0, 1), (1, 9), (4, 1)),
            Used(7, "in", 0.5),
            Used(8, "out", 0.25),
            Progressed(8, 0, 100, 400),
            Arrived(9, 1, 10, 32, 2.5),
            Saved(9.5, 5),
        ]
    )
    server = next(pid for pid, name in process_names(lines).items() if name == "server")
    mark, saved = [line for line in lines if line["ph"] == "i" and line["pid"] == server]
    assert (saved["name"], saved["ts"], saved["args"]) == ("checkpoint 5", 9_500_000, {"version": 5})
    assert (mark["name"], mark["ts"], mark["s"]) == ("apply 5", 7_000_000, "t")
    assert mark["args"] == {"version": 5, "workers": [0, 1], "iterations": [1, 9], "staleness": [4, 1]}
    counters = [(line["name"], line["ts"], line["args"]) for line in lines if line["ph"] == "C"]
    assert counters == [
        ("staleness", 7_000_000, {"mean": 2.5}),
        ("links", 7_000_000, {"in": 0.5, "out": 0.0}),
        ("links", 8_000_000, {"in": 0.5, "out": 0.25}),
        ("samples", 8_000_000, {"done": 100}),
        ("loss", 9_000_000, {"last": 2.5}),
    ]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_written_as_a_string(loss: float) -> None:
    lines = written([*SERVED[:-1], Arrived(7, 0, 1, 32, loss)])
    assert {str(float(line["args"]["loss"])) for line in slices(lines)} == {str(loss)}
    assert not [line for line in lines if line["ph"] == "C"]


def test_joining_leaving_and_loss_of_a_worker_are_marked() -> None:
    lines = written([Joined(0, 0), Left(1, 0, lost=True), Joined(2, 0, 2), Left(3, 0)])
    marks = [(line["name"], line["ts"], line["args"]) for line in lines if line["ph"] == "i"]
    assert marks == [
        ("joined", 0, {"incarnation": 1}),
        ("lost", 1_000_000, {}),
        ("joined", 2_000_000, {"incarnation": 2}),
        ("left", 3_000_000, {}),
    ]
    assert len(process_names(lines)) == 1, "a worker that returns keeps its process"


# Whole runs


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("policy", [*names(), "bsp:pipeline=true", "r2sp:groups=2"])
@pytest.mark.parametrize("faults", [0, 6])
def test_slices_of_a_lane_never_overlap(policy: str, streamed: bool, faults: int) -> None:
    events, _ = simulated(policy, streamed, faults)
    lines = written(events)
    end = round(events[-1].time * 1e6)
    lanes: dict[int, list[Line]] = {}
    for line in slices(lines):
        assert line["dur"] > 0
        assert 0 <= line["ts"] <= line["ts"] + line["dur"] <= end
        assert isinstance(line["ts"], int)
        lanes.setdefault(line["tid"], []).append(line)
    computed = {line["pid"] for line in slices(lines, "compute")}
    assert len(computed) == 8 or (computed and faults), "a worker that is killed early may never compute"
    for lane in lanes.values():
        lane.sort(key=lambda line: line["ts"])
        for before, after in pairwise(lane):
            assert before["ts"] + before["dur"] <= after["ts"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("policy", ["bsp", "asp", "ssp:staleness=1", "r2sp", "r2sp:groups=2"])
def test_lanes_add_up_to_the_report(policy: str, streamed: bool) -> None:
    events, report = simulated(policy, streamed)
    lines = written(events)
    arrivals = sum(isinstance(event, Arrived) for event in events)
    # Activities that the end of the run cut off are drawn, but they are not in the report.
    cut = [line for line in slices(lines) if "cut off by the end" in line["args"]]
    lines = [line for line in lines if "cut off by the end" not in line["args"]]
    microsecond = 1e-6 * len(lines)
    assert seconds(lines, "wait") == pytest.approx(report.blocking_seconds * arrivals, abs=microsecond)
    # The report contains a pull that had ended before its iteration was cut off.
    computing = {line["pid"] for line in cut if line["cat"] == "compute"}
    moved = seconds(lines, "push", "pull") + seconds([line for line in cut if line["pid"] in computing], "pull")
    assert moved == pytest.approx(report.communication_seconds * arrivals, abs=microsecond)


@pytest.mark.parametrize("faults", [0, 6])
@pytest.mark.parametrize("policy", names())
def test_every_applied_update_has_its_staleness(policy: str, faults: int) -> None:
    events, _ = simulated(policy, faults=faults)
    found = Counter(
        (line["args"]["iteration"], line["args"]["batch"], line["args"]["staleness"])
        for line in slices(written(events), "compute")
        if "staleness" in line["args"]
    )
    batches = {(e.worker, e.incarnation, e.iteration): e.batch_size for e in events if isinstance(e, Arrived)}
    kept = {(e.worker, e.incarnation, e.iteration) for e in events if isinstance(e, Kept)}
    applied = Counter(
        (update[2], batches[update], stale)
        for event in events
        if isinstance(event, Applied)
        for update, stale in zip(
            identities(event.workers, event.iterations, event.incarnations), event.staleness, strict=True
        )
        if update not in kept
    )
    assert found == applied


def test_processes_and_lanes_have_names_and_an_order() -> None:
    events, _ = simulated("r2sp")
    lines = written(events)
    named = process_names(lines)
    assert set(named.values()) == {f"worker {worker}" for worker in range(8)} | {"server"}
    places = {line["pid"]: line["args"]["sort_index"] for line in lines if line["name"] == "process_sort_index"}
    assert sorted(named, key=lambda pid: places[pid]) == sorted(named, key=lambda pid: named[pid])
    lanes = {(line["pid"], line["tid"]): line["args"]["name"] for line in lines if line["name"] == "thread_name"}
    for pid, name in named.items():
        mine = [lane for (process, _), lane in lanes.items() if process == pid]
        assert mine == (["apply"] if name == "server" else list(LANES))
    ids = [tid for _, tid in lanes] + list(named)
    assert len(ids) == len(set(ids)), "some readers identify a lane by its id alone"
    for line in slices(lines):
        assert lanes[line["pid"], line["tid"]] == line["cat"]
        assert line["name"].endswith(f" {line['args']['iteration']}")


def test_several_runs_are_placed_one_below_the_other() -> None:
    events: list[Event] = []
    for policy, apply in (("bsp", "whole"), ("r2sp", "streamed"), ("bsp", "whole")):
        events.append(Began(0.0, "r2sp-b", policy, apply, 0))
        events += simulated(policy, apply == "streamed")[0]
    lines = written(events)
    named = process_names(lines)
    assert Counter(name.rpartition(" | ")[0] for name in named.values()) == {"bsp": 18, "r2sp (streamed)": 9}
    places = {line["pid"]: line["args"]["sort_index"] for line in lines if line["name"] == "process_sort_index"}
    order = [named[pid] for pid in sorted(places, key=lambda pid: places[pid])]
    one = ["server", *(f"worker {worker}" for worker in range(8))]
    assert order == [f"{run} | {name}" for run in ("bsp", "r2sp (streamed)", "bsp") for name in one]
    alone = slices(written(simulated("bsp")[0]))
    third = [line for line in slices(lines) if places[line["pid"]] >= 2_000_000]
    assert [(line["ts"], line["dur"], line["name"]) for line in third] == [
        (line["ts"], line["dur"], line["name"]) for line in alone
    ]


# Incomplete runs


def test_every_prefix_of_a_run_is_a_valid_trace() -> None:
    events = simulated("r2sp", faults=4)[0]
    for count in range(0, len(events), 37):
        lines = written(events[:count])
        end = max((event.time for event in events[:count]), default=0.0)
        assert all(line["ts"] + line["dur"] <= round(end * 1e6) for line in slices(lines))


def test_a_run_that_fails_leaves_a_valid_trace() -> None:
    out = io.StringIO()

    def events() -> Iterator[Event]:
        yield from SERVED
        raise OSError("the trace cannot be read")

    with pytest.raises(OSError, match="cannot be read"):
        write(events(), out)
    assert [line["name"] for line in slices(parsed(out.getvalue()))] == ["pull and compute 1", "push 1"]


def test_memory_holds_only_undecided_iterations() -> None:
    held = 0
    out = io.StringIO()

    class Watched(Perfetto):
        def granted(self, time: float, worker: int, batch_size: int | None, progress_gap: int) -> None:
            nonlocal held
            super().granted(time, worker, batch_size, progress_gap)
            held = max(held, len(self._undecided) + sum(len(record.slices) for record in self._workers.values()))

    for iterations in (5, 50):
        with Watched(out) as perfetto:
            Cluster(load_cluster("r2sp-b"), make("r2sp"), iterations, observer=perfetto).run()
        assert 0 < held <= 8 * 7, "one update and six slices for each worker"
