"""Networks: addresses, peers, cables and routes."""

from __future__ import annotations

from collections import deque

import pytest

from paceline.collectives.topology import BCube, DCell, FatTree, Topology, TopologyError, Torus, topology

NETWORKS = [
    BCube(2, 1),
    BCube(3, 2),
    BCube(2, 3),
    Torus([3]),
    Torus([2, 2]),
    Torus([4, 3]),
    Torus([3, 3, 3]),
    DCell(2, 2),
    DCell(4, 2),
    DCell(2, 3),
    FatTree(4),
    FatTree(6),
]


def named(net: Topology) -> str:
    return net.name


def distances(net: Topology, start: int) -> dict[int, int]:
    """Return the number of links to every node, by breadth-first search."""
    beside: dict[int, list[int]] = {}
    for cable in net.cables:
        beside.setdefault(cable.node, []).append(cable.other)
        beside.setdefault(cable.other, []).append(cable.node)
    found, left = {start: 0}, deque([start])
    while left:
        node = left.popleft()
        for other in beside[node]:
            if other not in found:
                found[other] = found[node] + 1
                left.append(other)
    return found


@pytest.mark.parametrize("net", NETWORKS, ids=named)
def test_every_port_has_one_cable(net: Topology) -> None:
    ends = [end for cable in net.cables for end in ((cable.node, cable.port), (cable.other, cable.other_port))]
    assert len(set(ends)) == len(ends)
    ports = {port for node, port in ends if node < net.servers}
    assert ports == set(range(net.ports))


@pytest.mark.parametrize("net", NETWORKS, ids=named)
def test_an_address_names_one_server(net: Topology) -> None:
    addresses = [net.address(server) for server in range(net.servers)]
    assert len(set(addresses)) == net.servers
    assert [net.server(address) for address in addresses] == list(range(net.servers))
    for level in range(net.levels):
        for server in range(net.servers):
            peers = net.peers(server, level)
            assert peers[net.digit(server, level)] == server and len(set(peers)) == net.sizes[level]
            assert all(net.peers(peer, level) == peers for peer in peers)


@pytest.mark.parametrize("net", NETWORKS, ids=named)
def test_routes_are_connected_and_short(net: Topology) -> None:
    for a in range(net.servers):
        least = distances(net, a)
        for b in range(net.servers):
            for direction in (1, -1):
                at, hops = a, net.hops(a, b, direction)
                for node, port in hops:
                    assert node == at
                    at = net.beyond(node, port)
                assert at == b
                assert len(hops) == least[b]


def test_the_direction_decides_where_both_ways_round_are_equally_short() -> None:
    net = Torus([4])
    assert net.hops(0, 2, 1) == [(0, 0), (1, 0)]
    assert net.hops(0, 2, -1) == [(0, 1), (3, 1)]
    assert net.hops(1, 0, 1) == [(1, 1)]


def test_the_papers_bcube() -> None:
    """Figure 4(a): servers 00, 01 and 02 share a switch, and so do 00, 10 and 20."""
    net = BCube(3, 2)
    assert net.name == "BCube(3, 1)" and net.servers == 9
    assert [net.address(peer) for peer in net.peers(0, 0)] == [(0, 0), (0, 1), (0, 2)]
    assert [net.address(peer) for peer in net.peers(0, 1)] == [(0, 0), (1, 0), (2, 0)]
    assert len({cable.other for cable in net.cables}) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bcub", 3, 2), "Did you mean 'bcube'"),
        (("ring", 3, 2), "there are bcube, dcell, torus, fattree"),
        (("bcube", 1, 2), "at least 2"),
        (("torus", 3, 0), "at least one level"),
        (("torus", 0, 2, (3, 1)), "at least 2 servers"),
        (("bcube", 0, 2, (3, 4)), "Only a torus"),
        (("dcell", 9, 4), "more than"),
        (("bcube", 64, 4), "too many"),
        (("fattree", 5, 1), "even"),
    ],
)
def test_a_network_that_cannot_exist_is_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        topology(*arguments)  # type: ignore[arg-type]


def test_a_torus_may_have_unequal_dimensions() -> None:
    net = topology("torus", sizes=(3, 4))
    assert net.name == "Torus 3×4" and net.sizes == (4, 3) and net.address(11) == (2, 3)
