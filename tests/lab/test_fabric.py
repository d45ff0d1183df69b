"""Fabrics: every NIC has its own rate, packets follow the topology's routes, and nothing is left behind."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("pyroute2")

from lab.labs import best, built
from lab.streams import LEAST, MOST, RATE, SIZE, next_from, sent_by_nic, share, streams
from paceline.collectives.topology import BCube, DCell, FatTree, Topology, Torus
from paceline.lab import fabric as fabrics
from paceline.lab.fabric import Fabric
from paceline.lab.namespaces import LabError

PORT = 4000


@pytest.fixture(scope="module")
def bcube() -> Iterator[Fabric]:
    with Fabric(BCube(2, 2), RATE) as fabric:
        yield fabric


@pytest.fixture(scope="module")
def torus() -> Iterator[Fabric]:
    with Fabric(Torus([3, 3]), RATE) as fabric:
        yield fabric


@pytest.fixture(scope="module")
def small() -> Iterator[Fabric]:
    with Fabric(Torus([2, 2]), RATE) as fabric:
        yield fabric


def need_forwarding(fabric: Fabric) -> None:
    if not fabric.forwards:
        pytest.skip("/proc/sys cannot be written here, so servers cannot forward packets")


# Rates


@built
@pytest.mark.slow
@pytest.mark.alone
def test_a_stream_over_each_nic_reaches_the_rate_and_no_more(bcube: Fabric) -> None:
    assert share(bcube, 1, (0, 1, 0)) > LEAST
    assert share(bcube, 1, (0, 2, 1)) > LEAST


@built
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.slow
def test_two_nics_carry_twice_as_much_as_one_and_two_streams_over_one_do_not(bcube: Fabric) -> None:
    assert share(bcube, 2, (0, 1, 0), (0, 2, 1)) > LEAST
    assert share(bcube, 2, (1, 0, 0), (2, 0, 1)) > LEAST
    assert share(bcube, 1, (0, 1, 0), (0, 1, 1)) > LEAST


@built
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.slow
def test_servers_forward_packets(bcube: Fabric) -> None:
    need_forwarding(bcube)
    assert share(bcube, 1, (0, 3, 0)) > LEAST
    assert sent_by_nic(bcube, (0, 3, 1)) == {(0, 0): 1.0, (1, 1): 1.0}
    assert sent_by_nic(bcube, (3, 0, 0)) == {(3, 0): 1.0, (2, 1): 1.0}


@built
@pytest.mark.slow
def test_the_byte_count_of_a_server_is_the_sum_of_its_nics(bcube: Fabric) -> None:
    need_forwarding(bcube)
    first, before, last = bcube.carried_by_nic(), bcube.carried(), bcube.carried_by_nic()
    for server in range(4):  # ARP requests may be sent between the counts
        for way, total in enumerate(before[bcube.host(server)]):
            least, most = (sum(nics[server, port][way] for port in range(2)) for nics in (first, last))
            assert least <= total <= most
    streams(bcube, (0, 3, 0))
    after = bcube.carried()
    sent, received = (
        {host: round((after[host][way] - before[host][way]) / SIZE, 1) for host in before} for way in (0, 1)
    )
    assert sent == {"server0": 1.0, "server1": 1.0, "server2": 0.0, "server3": 0.0}
    assert received == {"server0": 0.0, "server1": 1.0, "server2": 0.0, "server3": 1.0}


@pytest.mark.matrix
@built
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.slow
def test_neighbours_in_a_torus_reach_each_other_over_the_nic_between_them(torus: Fabric) -> None:
    for server in (0, 5):
        flows = [(server, torus.net.beyond(server, port), port) for port in range(4)]
        assert sent_by_nic(torus, *flows) == {(server, port): 1.0 for port in range(4)}
    assert share(torus, 4, *flows) > LEAST


@pytest.mark.matrix
@built
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.slow
def test_two_cables_between_two_servers_carry_twice_as_much(small: Fabric) -> None:
    assert sent_by_nic(small, (0, 1, 0)) == {(0, 0): 1.0}
    assert sent_by_nic(small, (0, 1, 1)) == {(0, 1): 1.0}
    assert sent_by_nic(small, (0, 2, 0), (0, 2, 1)) == {(0, 2): 1.0, (0, 3): 1.0}
    assert share(small, 2, (0, 1, 0), (0, 1, 1)) > LEAST


@built
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.slow
def test_a_fabric_is_a_lab(bcube: Fabric) -> None:
    from paceline.lab.hosts import goodput  # not at the top: every process in a fabric imports this module

    assert best(lambda: goodput(bcube), LEAST, most=1.05) > LEAST
    assert bcube.call("server3", os.getpid) != os.getpid()
    command = bcube.spawn("server2", [sys.executable, "-c", "import sys; sys.exit(7)"], os.environ)
    command.join(MOST)
    assert command.exitcode == 7
    bcube.stop([command])


@built
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.slow
def test_each_level_has_its_own_rate() -> None:
    with Fabric(BCube(2, 2).with_rates([RATE, RATE / 4]), RATE) as fabric:
        assert share(fabric, 1, (0, 1, 0)) > LEAST
        assert share(fabric, 0.25, (0, 2, 1)) > LEAST


# Reachability


def accept_all(pipe: Connection) -> None:
    with socket.create_server(("0.0.0.0", PORT), backlog=128) as listener:
        pipe.send("listening")
        while True:
            listener.accept()[0].close()


def unreached(addresses: list[str], seconds: float = MOST) -> list[str]:
    """Return the addresses that do not answer."""
    found = []
    for address in addresses:
        try:
            socket.create_connection((address, PORT), seconds).close()
        except OSError:
            found.append(address)
    return found


def listen(fabric: Fabric, *servers: int) -> list[BaseProcess]:
    """Accept connections on these servers, or on all of them."""
    pipes, processes = [], []
    for server in servers or range(fabric.net.servers):
        ours, theirs = fabric.pipe()
        processes.append(fabric.start(fabric.host(server), accept_all, theirs))
        pipes.append(ours)
    assert all(next_from(pipe) == "listening" for pipe in pipes)
    return processes


@built
@pytest.mark.slow
@pytest.mark.parametrize(
    "net",
    [
        BCube(2, 3),
        pytest.param(Torus([4, 2]), marks=pytest.mark.matrix),
        pytest.param(DCell(2, 2), marks=pytest.mark.matrix),
    ],
    ids=lambda net: net.name,
)
def test_every_server_reaches_every_nic(net: Topology) -> None:
    with Fabric(net, RATE) as fabric:
        need_forwarding(fabric)
        listen(fabric)
        addresses = [fabric.nic_address(server, port) for server in range(net.servers) for port in range(net.ports)]
        assert len(set(addresses)) == net.servers * net.ports
        missing = fabric.calls([(host, unreached, (addresses,)) for host in fabric.rates])
        assert missing == [[]] * net.servers


@built
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.slow
def test_cutting_a_nic_cuts_no_other_and_mending_restores_it() -> None:
    with Fabric(BCube(2, 2), RATE) as fabric:
        listen(fabric)

        def missing(host: str = "server0") -> list[str]:
            found: list[str] = fabric.call(host, unreached, ["10.0.0.2", "10.1.0.3"], 0.5)
            return found

        assert missing() == []
        fabric.cut_nic(0, 1)
        assert missing() == ["10.1.0.3"]
        fabric.cut_nic(0, 1)
        fabric.mend_nic(0, 1)
        assert missing() == []
        assert share(fabric, 1, (0, 2, 1)) > LEAST, "shaped as before"
        fabric.cut("server0")
        assert missing() == ["10.0.0.2", "10.1.0.3"]
        assert missing("server3") == [] or not fabric.forwards
        fabric.mend("server0")
        fabric.mend("server0")
        assert missing() == []


@built
@pytest.mark.slow
def test_a_direct_cable_is_cut_while_one_of_its_ends_is_unplugged(small: Fabric) -> None:
    """Its addresses stay, so that servers reach them over other cables."""
    serving = listen(small, 1)

    def missing(server: int) -> list[str]:
        found: list[str] = small.call(small.host(server), unreached, ["10.0.0.2", "10.1.0.2"], 0.5)
        return found

    assert missing(3) == missing(0) == []
    small.cut_nic(0, 0)  # its other end is port 1 of server 1
    assert missing(0) == ["10.0.0.2"]
    assert missing(3) == []
    small.cut_nic(1, 1)
    small.mend_nic(0, 0)
    assert missing(0) == ["10.0.0.2"]
    small.mend_nic(1, 1)
    assert missing(0) == []
    small.stop(serving)


# Names and errors


@pytest.mark.slow
@built
def test_hosts_interfaces_and_addresses(bcube: Fabric) -> None:
    assert list(bcube.rates) == [bcube.host(server) for server in range(4)]
    assert bcube.host(3) == "server3"
    assert [bcube.interface(port) for port in range(2)] == ["eth0", "eth1"]
    assert bcube.nic_address(2, 1) == "10.1.0.3"
    assert bcube.address("server2") == bcube.nic_address(2, 0) == "10.0.0.3"
    assert {name for _, name in bcube.call("server1", socket.if_nameindex)} == {"lo", "eth0", "eth1"}
    for ask in (
        lambda: bcube.host(4),
        lambda: bcube.nic_address(-1, 0),
        lambda: bcube.interface(2),
        lambda: bcube.nic_address(0, 2),
        lambda: bcube.cut_nic(0, -1),
    ):
        with pytest.raises(LabError, match=r"^There is no (host|port) .* in this (lab|fabric)"):
            ask()


@built
def test_nothing_is_left_behind() -> None:
    def namespaces() -> set[str]:
        return {name for name in os.listdir("/run/netns") if name.startswith(f"paceline-{os.getpid()}-")}

    others = namespaces()
    with Fabric(BCube(2, 1), RATE) as fabric:
        assert namespaces() - others == {fabric.namespace("server0"), fabric.namespace("server1"), fabric._switch}
        sleeper = fabric.start("server1", time.sleep, 100)
    assert namespaces() == others
    assert sleeper.exitcode is not None


@pytest.mark.slow
@built
def test_a_fabric_without_forwarding_is_built_where_settings_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fabrics, "SETTINGS", tmp_path / "nosuch")
    with Fabric(BCube(2, 1), RATE) as fabric:
        assert not fabric.forwards
        listen(fabric)
        assert fabric.call("server0", unreached, ["10.0.0.1", "10.0.0.2"]) == []


def test_a_topology_with_cables_between_switches_is_refused() -> None:
    with pytest.raises(LabError, match=r"^A fabric cannot have cables between switches, as fat tree.*\.$"):
        Fabric(FatTree(4), RATE)
