"""Flows on links: their rates, when each ends, and that no byte is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.simulate.clock import Clock
from paceline.simulate.colocated_network import Mesh
from paceline.simulate.network import DIRECTIONS, Direction, Flow, Network, Star
from tries import tries

MB = 1e6
few = tries(50, 150)


class Wires:
    """A network with its own clock, which records when each transfer ends."""

    def __init__(self, links: Sequence[float], capacity: float | None) -> None:
        self.clock = Clock()
        self.use: dict[Direction, float] = dict.fromkeys(DIRECTIONS, 0.0)
        self.network: Network
        if capacity is None:
            self.network = Mesh(self.clock, links, self._used)
        else:
            self.network = Star(self.clock, links, dict.fromkeys(DIRECTIONS, capacity), self._used)
        self.ends: dict[str, float] = {}
        self.flows: dict[str, Flow] = {}

    def _used(self, direction: Direction, fraction: float) -> None:
        self.use[direction] = fraction

    def send(self, name: str, worker: int, size: float, at: float = 0.0, direction: Direction = "in") -> None:
        self.clock.at(at, self._start, (name, worker, size, direction))

    def _start(self, what: tuple[str, int, float, Direction]) -> None:
        name, worker, size, direction = what
        self.flows[name] = self.network.port(worker, direction).start(size, self._ended, name)

    def _ended(self, name: Any) -> None:
        assert name not in self.ends, "a transfer ends once"
        self.ends[name] = self.clock.now

    def run(self, until: float = 1e9) -> dict[str, float]:
        self.clock.at(until, self._halt)
        while self.clock.run(10_000):
            pass
        self.clock.running = True
        return self.ends

    def _halt(self, _: None) -> None:
        self.clock.running = False


# Separate servers


def test_a_single_transfer_runs_at_the_rate_of_its_own_link() -> None:
    wires = Wires([100 * MB], capacity=400 * MB)
    wires.send("a", 0, 50 * MB)
    assert wires.run() == {"a": pytest.approx(0.5)}


def test_a_single_transfer_is_no_faster_than_the_servers() -> None:
    wires = Wires([100 * MB], capacity=40 * MB)
    wires.send("a", 0, 50 * MB)
    assert wires.run() == {"a": pytest.approx(1.25)}


def test_the_servers_links_are_shared_equally() -> None:
    wires = Wires([100 * MB] * 4, capacity=100 * MB)
    for i in range(4):
        wires.send(f"{i}", i, 50 * MB)
    assert wires.run() == {f"{i}": pytest.approx(2.0) for i in range(4)}


def test_slow_links_get_all_they_can_use_and_the_others_share_the_rest() -> None:
    # Two links have 10 MB/s, one 100. Of 80 MB/s the fast one gets 60, since the slow ones cannot use a third each.
    wires = Wires([10 * MB, 10 * MB, 100 * MB], capacity=80 * MB)
    for i in range(3):
        wires.send(f"{i}", i, 60 * MB)
    wires.run(until=0.5)
    assert wires.use["in"] == pytest.approx(1.0)
    # When the fast one is done after 1 s, the slow ones continue at 10 MB/s, a quarter of the servers' links.
    wires.run(until=2.0)
    assert wires.use["in"] == pytest.approx(0.25)
    assert wires.run() == {"0": pytest.approx(6.0), "1": pytest.approx(6.0), "2": pytest.approx(1.0)}
    assert wires.use["in"] == 0.0


def test_unequal_links_do_not_matter_if_the_servers_limit_all_transfers() -> None:
    wires = Wires([40 * MB, 100 * MB], capacity=60 * MB)
    wires.send("slow", 0, 30 * MB)
    wires.send("fast", 1, 30 * MB)
    assert wires.run() == {"slow": pytest.approx(1.0), "fast": pytest.approx(1.0)}


def test_a_later_transfer_takes_its_share_from_then_on() -> None:
    wires = Wires([100 * MB] * 2, capacity=100 * MB)
    wires.send("first", 0, 100 * MB)
    wires.send("second", 1, 100 * MB, at=0.5)
    # 50 MB alone, then 50 MB at half the rate. Then the second transfer has the links for its last 50 MB.
    assert wires.run() == {"first": pytest.approx(1.5), "second": pytest.approx(2.0)}


def test_the_two_directions_do_not_disturb_each_other() -> None:
    wires = Wires([100 * MB], capacity=100 * MB)
    wires.send("push", 0, 100 * MB)
    wires.send("pull", 0, 100 * MB, direction="out")
    assert wires.run() == {"push": pytest.approx(1.0), "pull": pytest.approx(1.0)}


def test_equal_flows_started_together_end_at_the_same_instant() -> None:
    wires = Wires([0.1 * MB] * 7, capacity=0.3 * MB)
    for i in range(7):
        wires.send(f"{i}", i, MB / 3, at=0.1)
    assert len(set(wires.run().values())) == 1


def test_a_stopped_flow_frees_its_share_and_returns_the_bytes_left() -> None:
    wires = Wires([100 * MB] * 2, capacity=100 * MB)
    wires.send("stays", 0, 100 * MB)
    wires.send("goes", 1, 100 * MB)
    wires.run(until=1.0)
    assert wires.network.stop(wires.flows["goes"]) == pytest.approx(50 * MB)
    assert wires.run() == {"stays": pytest.approx(1.5)}


@pytest.mark.parametrize("capacity", [100 * MB, None], ids=["star", "mesh"])
def test_a_flow_that_has_ended_or_was_stopped_has_nothing_left(capacity: float | None) -> None:
    wires = Wires([100 * MB] * 2, capacity)
    wires.send("ends", 0, 10 * MB)
    wires.send("stopped", 1, 1000 * MB)
    wires.run(until=1.0)
    assert wires.network.stop(wires.flows["ends"]) == 0.0
    assert wires.network.stop(wires.flows["stopped"]) > 0.0
    assert wires.network.stop(wires.flows["stopped"]) == 0.0
    assert list(wires.run()) == ["ends"]


def test_a_transfer_that_is_stopped_and_resumed_takes_as_long_as_an_uninterrupted_one() -> None:
    wires = Wires([100 * MB], capacity=400 * MB)
    wires.send("before", 0, 100 * MB)
    wires.run(until=0.3)
    left = wires.network.stop(wires.flows["before"])
    wires.send("after", 0, left, at=5.0)
    assert wires.run() == {"after": pytest.approx(5.7)}


@pytest.mark.parametrize("capacity", [10e9, None], ids=["star", "mesh"])
@pytest.mark.parametrize("start", [0.0, 1e4, 1e6, 1e8])
def test_a_fast_flow_ends_late_on_the_clock_too(capacity: float | None, start: float) -> None:
    """Late on the clock, the precision of a float is more bytes than a flow may be short of its end."""
    wires = Wires([5e9, 3e9], capacity)
    for i in range(20):
        wires.send(f"{i}", i % 2, 7e6 / 3, at=start + 0.1 + i / 7)
    ends = wires.run(until=start + 10)
    assert len(ends) == 20
    assert wires.clock.pops < 200


# Any shares

LINKS = st.lists(st.sampled_from([1.0, 2.0, 2.5, 10.0]), min_size=1, max_size=6)
SIZES = st.floats(0.1, 100.0)
SENDS = st.lists(st.tuples(st.integers(0, 5), SIZES, st.floats(0.0, 20.0)), min_size=1, max_size=12)


@few
@given(LINKS, st.floats(0.5, 30.0), SENDS)
def test_shares_fit_the_links_and_no_flow_could_be_faster(
    links: list[float], capacity: float, sends: list[tuple[int, float, float]]
) -> None:
    clock = Clock()
    star = Star(clock, links, dict.fromkeys(DIRECTIONS, capacity))
    for worker, size, at in sends:
        port = star.port(worker % len(links), "in")
        clock.at(at, lambda _, port=port, size=size: port.start(size, lambda _: None, None))  # type: ignore[misc]
    while clock.run(1):
        lanes = [lane for lane in {id(lane): lane for lane in star._lanes["in"]}.values() if lane.count]
        total = sum(lane.count * lane.rate for lane in lanes)
        assert total <= capacity * (1 + 1e-9)
        full = total >= capacity * (1 - 1e-9)
        fastest = max((lane.rate for lane in lanes), default=0.0)
        for lane in lanes:
            assert lane.rate <= lane.cap
            at_its_link = lane.rate == lane.cap
            assert at_its_link or (full and lane.rate >= fastest * (1 - 1e-9)), "a flow could be faster"


@few
@given(LINKS, st.floats(0.5, 30.0), SENDS, st.floats(0.0, 30.0))
def test_no_byte_is_lost(
    links: list[float], capacity: float, sends: list[tuple[int, float, float]], until: float
) -> None:
    """The bytes left of all flows, and the use of the links over time, add up to what was sent."""
    clock = Clock()
    carried, rate, since = 0.0, 0.0, 0.0

    def used(direction: Direction, fraction: float) -> None:
        nonlocal carried, rate, since
        carried += rate * (clock.now - since)
        rate, since = fraction * capacity, clock.now

    star = Star(clock, links, dict.fromkeys(DIRECTIONS, capacity), used)
    flows: list[Flow] = []
    ended: list[int] = []
    started = 0.0

    def start(what: tuple[int, int, float]) -> None:
        nonlocal started
        number, worker, size = what
        started += size
        flows.append(star.port(worker, "in").start(size, ended.append, number))

    def halt(_: None) -> None:
        clock.running = False

    for number, (worker, size, at) in enumerate(sends):
        clock.at(at, start, (number, worker % len(links), size))
    clock.at(until, halt)
    while clock.run(1_000):
        pass
    clock.now = until
    left = sum(star.stop(flow) for flow in list(flows))
    assert carried + left == pytest.approx(started, abs=0.01 * len(sends))
    assert len(ended) == len(set(ended))


@few
@given(LINKS, SENDS)
def test_a_mesh_carries_everything_and_overfills_no_link(
    links: list[float], sends: list[tuple[int, float, float]]
) -> None:
    clock = Clock()
    mesh = Mesh(clock, links)
    busy: set[tuple[int, Direction]] = set()
    ended = 0

    def start(what: tuple[int, Direction, float]) -> None:
        worker, direction, size = what
        if (worker, direction) not in busy:  # a worker has at most one push and one pull at a time
            busy.add((worker, direction))
            mesh.start(worker, direction, size, end, (worker, direction))

    def end(who: tuple[int, Direction]) -> None:
        nonlocal ended
        busy.remove(who)
        ended += 1

    for worker, size, at in sends:
        clock.at(at, start, (worker % len(links), DIRECTIONS[worker % 2], size))
    others = max(len(links) - 1, 1)
    while clock.run(1):
        sent, received = [0.0] * len(links), [0.0] * len(links)
        for flow, (worker, direction) in mesh._flows.items():
            own, far = (sent, received) if direction == "in" else (received, sent)
            own[worker] += mesh._rates[flow]
            for other in range(len(links)):
                if other != worker:
                    far[other] += mesh._rates[flow] / others
        for use, link in zip(sent + received, [*links, *links], strict=True):
            assert use <= link * (1 + 1e-6)
        full = [use >= link * (1 - 1e-6) for use, link in zip(sent + received, [*links, *links], strict=True)]
        assert not mesh._flows or any(full), "all flows could be faster"
    assert not busy
    assert ended > 0


# A server beside each worker


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_in_a_mesh_all_workers_push_and_then_all_pull(workers: int) -> None:
    S, b = 80 * MB, 100 * MB
    wires = Wires([b] * workers, capacity=None)
    one_way = (workers - 1) / workers * S / b
    for i in range(workers):
        wires.send(f"push {i}", i, S)
        wires.send(f"pull {i}", i, S, at=10.0, direction="out")
    ends = wires.run()
    for i in range(workers):
        assert ends[f"push {i}"] == pytest.approx(one_way)
        assert ends[f"pull {i}"] == pytest.approx(10.0 + one_way)


def test_in_a_mesh_pushes_and_pulls_share_the_links() -> None:
    # Each link sends its own push and half of the other two pulls at once, so all take twice as long as one at a time.
    wires = Wires([100 * MB] * 3, capacity=None)
    for i in range(3):
        wires.send(f"push {i}", i, 90 * MB)
        wires.send(f"pull {i}", i, 90 * MB, direction="out")
    assert wires.run() == {f"{what} {i}": pytest.approx(1.2) for what in ("push", "pull") for i in range(3)}


def test_in_a_mesh_one_push_is_spread_over_the_others() -> None:
    # 2/3 of 90 MB leave over a's link at 40 MB/s. Each of the others receives 20 MB/s, which its 25 MB/s allow.
    wires = Wires([40 * MB, 25 * MB, 25 * MB], capacity=None)
    wires.send("a", 0, 90 * MB)
    assert wires.run() == {"a": pytest.approx(1.5)}


def test_in_a_mesh_the_slowest_receiver_limits_a_push() -> None:
    # b receives at most 10 MB/s, and c receives as much: 20 MB/s together for 2/3 of 90 MB.
    wires = Wires([40 * MB, 10 * MB, 25 * MB], capacity=None)
    wires.send("a", 0, 90 * MB)
    assert wires.run() == {"a": pytest.approx(3.0)}


def test_in_a_mesh_of_one_nothing_travels() -> None:
    wires = Wires([40 * MB], capacity=None)
    wires.send("a", 0, 90 * MB, at=1.0)
    assert wires.run() == {"a": 1.0}


def test_a_transfer_occupies_the_servers_links_for_its_size_over_their_rate() -> None:
    assert Wires([10 * MB] * 4, capacity=40 * MB).network.occupies(80 * MB, "in") == pytest.approx(2.0)
