"""Every algorithm on every network is an all-reduce, and the checker finds schedules that are not."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.collectives.algorithms import ALGORITHMS, STAGES, AlgorithmError, hips, make
from paceline.collectives.check import ScheduleError, check
from paceline.collectives.schedule import Schedule, ScheduleProcess, Step
from paceline.collectives.topology import BCube, DCell, FatTree, Topology, Torus
from tries import tries

SHAPES = [(n, h) for n in (2, 3, 4, 5) for h in (1, 2, 3)]
SIZES = (0, 1, 7, 1003)


def networks(n: int, h: int) -> list[Topology]:
    return [BCube(n, h), Torus([n] * h)]


def sizes(n: int, h: int) -> list[Any]:
    """Return cases of a shape. A large network has its small sizes, which smaller networks have too, in the matrix."""
    if n**h <= 32:
        return [(n, h, SIZES)]
    some = pytest.param(n, h, SIZES[-1:], marks=() if n**h < 100 else pytest.mark.matrix)
    return [some, pytest.param(n, h, SIZES[:-1], marks=pytest.mark.matrix)]


@pytest.mark.parametrize(("n", "h", "sizes"), [case for shape in SHAPES for case in sizes(*shape)])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_ends_with_the_sum_of_all(n: int, h: int, sizes: tuple[int, ...], name: str) -> None:
    for net, elements in product(networks(n, h), sizes):
        if name == "rings" and h == 3 and n % 2 == 0 and (n == 2 or isinstance(net, BCube)):
            with pytest.raises(AlgorithmError, match="Edge-disjoint"):
                make(name, net, elements)
        else:
            check(make(name, net, elements), net)


@pytest.mark.parametrize(("n", "h"), [(2, 2), (3, 2), (2, 3), (3, 3)])
def test_every_choice_of_stages_is_an_all_reduce(n: int, h: int) -> None:
    for net, stages in product(networks(n, h), product(STAGES, repeat=h)):
        check(hips(net, 101, stages), net)


@pytest.mark.parametrize(
    "net",
    [DCell(2, 2), DCell(3, 2), DCell(2, 3), FatTree(4), Torus([3, 4]), Torus([2, 3, 4])],
    ids=lambda net: net.name,
)
def test_every_algorithm_works_on_other_networks(net: Topology) -> None:
    for name, elements in product(("hips", "ring", "mesh", "ps"), (1, 250)):
        check(make(name, net, elements, ["mesh"]))
        check(make(name, net, elements, ["ring"]))


@tries(25, 100, derandomize=False)
@given(st.data())
def test_any_size_and_any_stages_are_an_all_reduce(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(2, 4), min_size=1, max_size=3))
    net = data.draw(st.sampled_from([Torus(sizes), BCube(sizes[0], len(sizes))]))
    stages = data.draw(st.lists(st.sampled_from(list(STAGES)), min_size=net.levels, max_size=net.levels))
    check(hips(net, data.draw(st.integers(0, 500)), stages))


def changed(schedule: Schedule, number: int, process: ScheduleProcess) -> Schedule:
    processes = list(schedule.processes)
    processes[number] = process
    return replace(schedule, processes=tuple(processes))


@pytest.mark.parametrize(
    "net", [BCube(2, 1), BCube(3, 2), Torus([3, 3]), Torus([2, 2]), BCube(2, 3)], ids=lambda net: net.name
)
@pytest.mark.parametrize("name", ["hips", "ring", "mesh", "ps", "mixed"])
def test_a_step_removed_doubled_or_swapped_is_found(net: Topology, name: str) -> None:
    stages = ["ring", "mesh", "ps"][: net.levels] if name == "mixed" else ["ring"]
    schedule = make("hips" if name == "mixed" else name, net, 60 * net.servers, stages)
    check(schedule)
    for number, process in enumerate(schedule.processes):
        steps = process.steps
        broken = []
        for at in range(len(steps)):
            broken.append((*steps[:at], *steps[at + 1 :]))
            broken.append((*steps[:at], steps[at], *steps[at:]))
            if at + 1 < len(steps):
                broken.append((*steps[:at], steps[at + 1], steps[at], *steps[at + 2 :]))
        for each in broken:
            with pytest.raises(ScheduleError):
                check(changed(schedule, number, replace(process, steps=each)))


def test_a_missing_process_is_found() -> None:
    schedule = make("hips", BCube(2, 2), 100)
    with pytest.raises(ScheduleError, match="do not belong to exactly one process"):
        check(replace(schedule, processes=schedule.processes[1:]))
    with pytest.raises(ScheduleError, match="belong to no process"):
        check(replace(schedule, processes=schedule.processes[:1]))


def test_transfers_between_wrong_servers_are_found() -> None:
    net = BCube(2, 2)
    schedule = make("hips", net, 100)
    (first, *_), process = schedule.processes[0].steps, schedule.processes[0]

    def with_first(step: Step) -> Schedule:
        return changed(schedule, 0, replace(process, steps=(step, *process.steps[1:])))

    with pytest.raises(ScheduleError, match="are not peers at level 1"):
        check(with_first(replace(first, level=1 - first.level)), net)
    with pytest.raises(ScheduleError, match="server -1 sends to"):
        check(with_first(replace(first, sender=first.sender - 1)))
    with pytest.raises(ScheduleError, match="A process without elements has transfers"):
        check(replace(schedule, processes=(ScheduleProcess(0, 0, (first,)), *schedule.processes)))


def test_no_server_is_sent_elements_while_it_sends_them() -> None:
    """The received elements may arrive before the sent ones have left."""
    zero, two = np.zeros(2, dtype=np.int64), np.full(2, 2)
    push = Step(True, np.array([1, 2]), np.array([0, 0]), zero, zero, two)
    pull = Step(False, np.array([0, 1]), np.array([1, 2]), zero, zero, two)
    with pytest.raises(ScheduleError, match="server 1 is sent elements while it is sending them"):
        check(Schedule(3, 2, (ScheduleProcess(0, 2, (push, pull)),)))


def test_hips_of_one_level_is_ring_all_reduce() -> None:
    net = BCube(4, 1)
    assert repr(hips(net, 64)) == repr(make("ring", net, 64))


def test_in_every_stage_each_process_has_nics_of_its_own() -> None:
    schedule = hips(BCube(3, 2), 900)
    first, second = schedule.processes
    for a, b in zip(first.steps, second.steps, strict=True):
        assert not set(a.level) & set(b.level)


def test_unknown_algorithms_and_wrong_stages_are_refused() -> None:
    net = BCube(2, 2)
    with pytest.raises(AlgorithmError, match="there are hips, ring, rings, mesh, ps"):
        make("mush", net, 10)
    with pytest.raises(AlgorithmError, match="There is no stage 'tree'"):
        make("hips", net, 10, ["tree"])
    with pytest.raises(AlgorithmError, match="has 2 levels: name 2 stages, or one for all levels; got 3"):
        make("hips", net, 10, ["ring"] * 3)
    assert make("rs", net, 10).steps == make("ring", net, 10).steps
