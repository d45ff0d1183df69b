"""Fabrics: every NIC has the rate, its own; packets go the way that the topology says; and nothing is left behind."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("pyroute2")

from lab.labs import built
from paceline.collectives.topology import BCube, DCell, FatTree, Topology, Torus
from paceline.lab import fabric as fabrics
from paceline.lab.fabric import Fabric
from paceline.lab.namespaces import LabError

RATE = 12.5e6
SIZE = 4_000_000  # bytes of a stream: a third of a second
LEAST = 0.85  # of the rate
MOST = 15.0  # seconds that anything may take
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


def forwarding(fabric: Fabric) -> None:
    if not fabric.forwards:
        pytest.skip("/proc/sys cannot be written here, so that no server passes on what is not for it")


# Streams


def receive(pipe: Connection) -> None:
    """Tell the port, and take a stream when told to; tell when it began and when it ended."""
    with socket.create_server(("0.0.0.0", 0)) as listener:
        listener.settimeout(MOST)
        pipe.send(listener.getsockname()[1])
        peer, _ = listener.accept()
    with peer:
        peer.settimeout(MOST)
        pipe.send("here")
        pipe.recv()
        began, left = time.monotonic(), SIZE
        peer.sendall(b".")
        while left:
            data = peer.recv(min(left, 1 << 16))
            assert data, "the stream ended early"
            left -= len(data)
        pipe.send((began, time.monotonic()))


def send(host: str, port: int) -> None:
    with socket.create_connection((host, port), MOST) as peer:
        peer.recv(1)
        peer.sendall(bytes(SIZE))


def hear(pipe: Connection) -> Any:
    assert pipe.poll(MOST), "nothing is heard of it"
    return pipe.recv()


def streams(fabric: Fabric, *flows: tuple[int, int, int]) -> float:
    """Bytes per second of streams that begin at the same time, all together, until the last has ended. flows: who
    sends, to whom, to which port of it."""
    pipes, processes = [], []
    for source, target, port in flows:
        ours, theirs = fabric.pipe()
        processes.append(fabric.start(fabric.host(target), receive, theirs))
        listening = hear(ours)
        processes.append(fabric.start(fabric.host(source), send, fabric.nic_address(target, port), listening))
        assert hear(ours) == "here"
        pipes.append(ours)
    for pipe in pipes:
        pipe.send("go")
    told = [hear(pipe) for pipe in pipes]
    fabric.stop(processes)
    return SIZE * len(flows) / float(max(ended for _, ended in told) - min(began for began, _ in told))


def share(fabric: Fabric, nics: int, *flows: tuple[int, int, int]) -> float:
    """What the streams reach of the rate of so many NICs, and they never reach more. Measured up to three times, since
    whatever else the machine does slows them down, and nothing makes them faster."""
    found: list[float] = []
    while len(found) < 3 and max(found, default=0.0) < LEAST:
        found.append(streams(fabric, *flows) / (nics * RATE))
    assert max(found) < 1.05
    return max(found)


def sent_meanwhile(fabric: Fabric, *flows: tuple[int, int, int]) -> dict[tuple[int, int], float]:
    """For each server and port, how often its NIC has sent the bytes of a stream, in tenths."""
    before = fabric.carried_by_nic()
    streams(fabric, *flows)
    after = fabric.carried_by_nic()
    times = {nic: round((after[nic][0] - before[nic][0]) / SIZE, 1) for nic in before}
    return {nic: count for nic, count in times.items() if count}


@built
@pytest.mark.slow
@pytest.mark.alone
def test_a_stream_over_each_nic_reaches_the_rate_and_no_more(bcube: Fabric) -> None:
    assert share(bcube, 1, (0, 1, 0)) > LEAST
    assert share(bcube, 1, (0, 2, 1)) > LEAST


@built
@pytest.mark.slow
@pytest.mark.alone
def test_two_nics_carry_twice_as_much_as_one_and_two_streams_over_one_do_not(bcube: Fabric) -> None:
    assert share(bcube, 2, (0, 1, 0), (0, 2, 1)) > LEAST
    assert share(bcube, 2, (1, 0, 0), (2, 0, 1)) > LEAST
    assert share(bcube, 1, (0, 1, 0), (0, 1, 1)) > LEAST


@built
@pytest.mark.slow
@pytest.mark.alone
def test_servers_pass_on_what_is_not_for_them(bcube: Fabric) -> None:
    forwarding(bcube)
    assert share(bcube, 1, (0, 3, 0)) > LEAST
    assert sent_meanwhile(bcube, (0, 3, 1)) == {(0, 0): 1.0, (1, 1): 1.0}
    assert sent_meanwhile(bcube, (3, 0, 0)) == {(3, 0): 1.0, (2, 1): 1.0}


@built
@pytest.mark.slow
def test_what_a_server_carried_is_what_its_nics_did(bcube: Fabric) -> None:
    forwarding(bcube)
    first, before, last = bcube.carried_by_nic(), bcube.carried(), bcube.carried_by_nic()
    for server in range(4):  # meanwhile a server may ask who has an address
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
def test_neighbours_in_a_torus_reach_each_other_over_the_nic_between_them(torus: Fabric) -> None:
    for server in (0, 5):
        flows = [(server, torus.net.beyond(server, port), port) for port in range(4)]
        assert sent_meanwhile(torus, *flows) == {(server, port): 1.0 for port in range(4)}
    assert share(torus, 4, *flows) > LEAST


@pytest.mark.matrix
@built
@pytest.mark.slow
@pytest.mark.alone
def test_two_cables_between_two_servers_are_two(small: Fabric) -> None:
    assert sent_meanwhile(small, (0, 1, 0)) == {(0, 0): 1.0}
    assert sent_meanwhile(small, (0, 1, 1)) == {(0, 1): 1.0}
    assert sent_meanwhile(small, (0, 2, 0), (0, 2, 1)) == {(0, 2): 1.0, (0, 3): 1.0}
    assert share(small, 2, (0, 1, 0), (0, 1, 1)) > LEAST


@built
@pytest.mark.slow
@pytest.mark.alone
def test_a_fabric_is_a_lab(bcube: Fabric) -> None:
    from paceline.lab.hosts import goodput  # here, since what runs in a fabric imports all that is above

    assert LEAST < goodput(bcube) < 1.05
    assert bcube.call("server3", os.getpid) != os.getpid()
    command = bcube.spawn("server2", [sys.executable, "-c", "import sys; sys.exit(7)"], os.environ)
    command.join(MOST)
    assert command.exitcode == 7
    bcube.stop([command])


# Who reaches whom


def greet_all(pipe: Connection) -> None:
    with socket.create_server(("0.0.0.0", PORT), backlog=128) as listener:
        pipe.send("listening")
        while True:
            listener.accept()[0].close()


def unreached(addresses: list[str], seconds: float = MOST) -> list[str]:
    """Those of the addresses that do not answer."""
    found = []
    for address in addresses:
        try:
            socket.create_connection((address, PORT), seconds).close()
        except OSError:
            found.append(address)
    return found


def listen(fabric: Fabric, *servers: int) -> list[BaseProcess]:
    """Have these servers, or all, answer those who connect."""
    pipes, processes = [], []
    for server in servers or range(fabric.net.servers):
        ours, theirs = fabric.pipe()
        processes.append(fabric.start(fabric.host(server), greet_all, theirs))
        pipes.append(ours)
    assert all(hear(pipe) == "listening" for pipe in pipes)
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
def test_everyone_reaches_every_nic(net: Topology) -> None:
    with Fabric(net, RATE) as fabric:
        forwarding(fabric)
        listen(fabric)
        all_of_them = [fabric.nic_address(server, port) for server in range(net.servers) for port in range(net.ports)]
        assert len(set(all_of_them)) == net.servers * net.ports
        missing = fabric.calls([(host, unreached, (all_of_them,)) for host in fabric.rates])
        assert missing == [[]] * net.servers


@built
@pytest.mark.slow
@pytest.mark.alone
def test_a_nic_that_is_cut_is_cut_alone_and_is_mended() -> None:
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
def test_a_cable_between_two_servers_is_cut_while_one_of_its_plugs_is_pulled(small: Fabric) -> None:
    """And its addresses stay: those who come by other cables still reach them."""
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


# Names, and what is refused


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


@built
def test_where_settings_cannot_be_written_there_is_a_fabric_that_forwards_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fabrics, "SETTINGS", tmp_path / "nosuch")
    with Fabric(BCube(2, 1), RATE) as fabric:
        assert not fabric.forwards
        listen(fabric)
        assert fabric.call("server0", unreached, ["10.0.0.1", "10.0.0.2"]) == []


def test_switches_that_are_joined_are_refused_in_a_sentence() -> None:
    with pytest.raises(LabError, match=r"^A fabric has no cables from switch to switch, as fat tree.*\.$"):
        Fabric(FatTree(4), RATE)
