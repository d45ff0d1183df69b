"""The choice of an algorithm, the shares of HiPS, and levels with rates of their own."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.collectives.algorithms import make, stages_of
from paceline.collectives.check import check
from paceline.collectives.choose import Choice, candidates, fastest
from paceline.collectives.flows import busiest_link, simulate
from paceline.collectives.formula import gst, least
from paceline.collectives.named import named
from paceline.collectives.shares import shares
from paceline.collectives.topology import BCube, DCell, FatTree, Topology, TopologyError, Torus
from tries import tries

RATE = 1.25e9

networks = st.one_of(
    st.builds(BCube, st.integers(2, 3), st.integers(1, 2)),
    st.builds(DCell, st.integers(2, 3), st.integers(1, 2)),
    st.just(FatTree(4)),
    st.builds(Torus, st.lists(st.integers(2, 5), min_size=1, max_size=2)),
)


@st.composite
def rated_networks(draw: st.DrawFn) -> Topology:
    """Return a network, in half of the cases with a rate for each level."""
    net: Topology = draw(networks)
    rates = [draw(st.sampled_from([0.25, 1.0, 1.5, 6.0])) * RATE for _ in range(net.levels)]
    return net.with_rates(rates) if draw(st.booleans()) else net


def simulated(net: Topology, choice: Choice, size: float, latency: float = 0.0) -> float:
    return simulate(net, make(choice.algorithm, net, round(size / 4), choice.stages or ("ring",)), RATE, latency)


@pytest.mark.slow
@tries(10, 25, derandomize=False)
@given(rated_networks(), st.sampled_from([4e5, 1e8]), st.sampled_from([0.0, 2e-5, 1e-3]))
def test_no_candidate_is_faster_than_the_choice(net: Topology, size: float, latency: float) -> None:
    chosen = fastest(net, size, RATE, latency)
    times = {(each.algorithm, each.stages): simulated(net, each, size, latency) for each in candidates(net)}
    assert {name for name, _ in times} >= {"hips", "ring", "mesh", "ps"}
    assert times[chosen.algorithm, chosen.stages] <= 1.002 * min(times.values())
    assert chosen.seconds == pytest.approx(times[chosen.algorithm, chosen.stages], rel=2e-3)
    assert min(times.values()) >= 0.999 * least(net, size, RATE)


@pytest.mark.slow
@tries(8, 15, derandomize=False)
@given(rated_networks(), st.sampled_from([1003, 10**6]))
def test_no_schedule_is_faster_than_its_busiest_link(net: Topology, elements: int) -> None:
    for each in candidates(net):
        schedule = make(each.algorithm, net, elements, each.stages or ("ring",))
        seconds = simulate(net, schedule, RATE)
        assert 0 < busiest_link(net, schedule, RATE) <= seconds * (1 + 1e-6)
        if each.algorithm == "mesh" and isinstance(net, BCube):
            assert busiest_link(net, schedule, RATE) > 0.5 * seconds


@pytest.mark.parametrize(
    ("net", "size", "latency", "algorithm"),
    [
        (DCell(4, 2), 1e8, 0.0, "ring"),  # 152 ms; HiPS takes 211
        (DCell(4, 2), 1e4, 1e-4, "mesh"),
        (FatTree(4), 1e8, 0.0, "mesh"),
        (Torus([4, 2]), 1e8, 0.0, "rings"),
        (Torus([4, 2, 2]), 1e8, 0.0, "hips"),
        (BCube(4, 2), 1e8, 0.0, "hips"),
    ],
    ids=lambda each: getattr(each, "name", str(each)),
)
def test_the_choice_may_be_a_flat_algorithm(net: Topology, size: float, latency: float, algorithm: str) -> None:
    assert fastest(net, size, RATE, latency).algorithm == algorithm


# Shares


@tries(8, 40, derandomize=False)
@given(st.data())
def test_the_formula_of_hips_is_exact_for_unequal_levels(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(2, 5), min_size=1, max_size=3))
    net: Topology = data.draw(st.sampled_from([Torus(sizes), BCube(sizes[0], len(sizes))]))
    if data.draw(st.booleans()):
        net = net.with_rates([RATE * data.draw(st.integers(1, 8)) for _ in sizes])
    stages = tuple(data.draw(st.sampled_from(["ring", "mesh"])) for _ in sizes)
    formula = gst(net, "hips", 1e9, RATE, 0.0, stages)
    assert formula and formula.exact
    assert simulate(net, make("hips", net, 250_000_000, stages), RATE) == pytest.approx(formula.seconds, rel=1e-3)
    assert sum(shares(net, stages)) == 1 and min(shares(net, stages)) >= 0


@pytest.mark.parametrize(
    ("net", "before"),
    [(Torus([4, 2, 2]), 38.33), (Torus([4, 3, 2]), 39.69), (Torus([3, 5, 3]), 34.67)],
    ids=lambda each: getattr(each, "name", ""),
)
def test_shares_make_hips_faster_on_unequal_tori(net: Topology, before: float) -> None:
    """With equal shares it took as long as `before`, in milliseconds."""
    assert 1e3 * simulated(net, Choice("hips"), 1e8) < 0.9 * before
    check(make("hips", net, 1003))


def test_levels_of_equal_size_and_rate_have_equal_shares() -> None:
    for net, stages in product((BCube(3, 3), Torus([4, 4])), (["ring"], ["mesh"])):
        for each in (net, net.with_rates([RATE])):
            assert shares(each, stages_of(net, stages)) == (Fraction(1, net.levels),) * net.levels


# Rates


def test_each_level_has_its_own_rate() -> None:
    net = BCube(2, 2).with_rates([8e9, 1e9])
    one_hop = {net.links[0, 0]: 8e9, net.links[0, 1]: 1e9}
    assert {link: net.link_rates(RATE)[link] for link in one_hop} == one_hop
    assert BCube(2, 2).link_rates(RATE) == [RATE] * 16
    tree = FatTree(4).with_rates([1.0, 2.0, 3.0])
    links = {tree.link_rates(RATE)[tree.links[hop]] for hop in tree.hops(0, 15)}
    assert links == {1.0, 2.0, 3.0} and {tree.link_rates(RATE)[link] for link in tree.route(0, 1)} == {1.0}
    for kind in (DCell(2, 2), Torus([3, 2])):
        rated = kind.with_rates([1.0, 2.0])
        for cable in rated.cables:
            same_cell = cable.other >= rated.servers or rated.digit(cable.node, 1) == rated.digit(cable.other, 1)
            assert rated.link_rates(RATE)[rated.links[cable.node, cable.port]] == (1.0 if same_cell else 2.0)


def test_hips_uses_the_slow_level_less() -> None:
    """Two levels of 600 and 100 Gbit/s: equal shares would take 7.5 ms, because one half begins at the slow level."""
    net = named("bcube:n=2,levels=2,rates=600Gbit/100Gbit").net
    assert net.rates == (75e9, 12.5e9) and net.name == "BCube(2, 1) of 600/100 Gbit/s"
    chosen = fastest(net, 1e8, RATE)
    assert chosen.algorithm == "hips" and chosen.seconds == pytest.approx(5e-3, rel=0.01)
    assert simulated(net, Choice("ring"), 1e8) == pytest.approx(12e-3)
    first, second = shares(net, ("ring", "ring"))
    assert first > 0.9 and second < 0.1


def test_the_choice_follows_the_rates() -> None:
    assert fastest(BCube(3, 2), 1e8, RATE).stages == ("mesh", "mesh")
    slow = Torus([4, 2]).with_rates([RATE, 8 * RATE])
    assert fastest(Torus([4, 2]), 1e8, RATE).algorithm == "rings" and fastest(slow, 1e8, RATE).algorithm == "hips"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bcube:n=2,levels=3,rates=1Gbit/2Gbit", "has 3 levels: give 3 rates, or one for all; got 2"),
        ("bcube:n=2,rates=1Gbit/0Gbit", "must be above 0"),
        ("bcube:n=2,rates=fast/slow", "rates must be one for each level, such as 600Gbit/100Gbit"),
    ],
)
def test_wrong_rates_are_refused(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        named(text)


def test_a_rate_may_be_in_bytes_per_second() -> None:
    assert named("bcube:n=2,rates=75GB/s/12.5GB/s").net.rates == (75e9, 12.5e9)
    assert named("torus:sizes=2x3,rates=10Gbit").net.rates == (1.25e9, 1.25e9)
