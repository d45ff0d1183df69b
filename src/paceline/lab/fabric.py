"""A fabric: a lab whose servers have several NICs, joined as a topology says, by switches or by cables alone.

Each server is a network namespace, and each of its NICs an interface there. The switches are bridges, all of them in
one namespace. A cable is a veth pair, and both its ends are shaped as those of a lab are.

    with Fabric(BCube(2, 2), 12.5e6) as fabric:                       # bytes per second of every NIC, each direction
        fabric.start(fabric.host(1), serve, fabric.nic_address(1, 0))
        fabric.call(fabric.host(0), push, fabric.nic_address(1, 0))

What is sent to a NIC of a server goes the way that the topology's routes go, over servers in between where there is no
cable. In a ring of two, two cables lead to the same server: what is for its even ports goes onwards, by the first of
them, and what is for its odd ports backwards, by the second. Answers come back by the same cable.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import permutations
from pathlib import Path
from typing import Any, TypeAlias

from paceline.collectives.topology import Topology
from paceline.lab.namespaces import CONGESTION_CONTROL, Lab, LabError
from paceline.lab.netns_exec import enter

SETTINGS = Path("/proc/sys/net/ipv4")
#: Servers pass on what is not for them; and the way back may be another than the way there, which some machines forbid.
FORWARDING = {"ip_forward": "1", "conf/all/rp_filter": "0", "conf/default/rp_filter": "0"}

End: TypeAlias = tuple[int, int]  # of a cable: node, port


class Fabric(Lab):
    """A lab of servers with several NICs, joined as a topology says."""

    forwards = False  # do servers pass on what is not for them? Known once it is built; a container may not allow it

    def __init__(self, net: Topology, rate: float) -> None:
        """rate: bytes per second of every NIC, each direction."""
        if any(min(cable.node, cable.other) >= net.servers for cable in net.cables):
            raise LabError(f"A fabric has no cables from switch to switch, as {net.name} has: take a BCube or a torus.")
        super().__init__({f"server{server}": rate for server in range(net.servers)})
        self.net, self.rate = net, rate
        self._across: dict[End, End] = {}
        for node, port, other, other_port in net.cables:
            self._across[node, port] = other, other_port
            self._across[other, other_port] = node, port
        self._pulled: set[End] = set()

    def host(self, server: int) -> str:
        """The name of that server as a host of the lab."""
        host = f"server{server}"
        self._number(host)
        return host

    def interface(self, port: int) -> str:
        """The NIC of that port, as it is called on its server."""
        if not 0 <= port < self.net.ports:
            raise LabError(f"There is no port {port} in this fabric; a server has {self.net.ports}.")
        return f"eth{port}"

    def nic_address(self, server: int, port: int) -> str:
        """Where that NIC of that server is reached from all the others."""
        self._nic(server, port)
        return f"10.{port}.{server >> 8}.{(server & 255) + 1}"

    def address(self, host: str) -> str:
        """Where a server is reached from the others: its first NIC."""
        return self.nic_address(self._number(host), 0)

    # Cables

    def cut(self, host: str) -> None:
        """Pull every plug of a server: nothing gets through, either way."""
        self._set_plugs(self._nics(self._number(host)), pulled=True)

    def mend(self, host: str) -> None:
        """Put them all back."""
        self._set_plugs(self._nics(self._number(host)), pulled=False)

    def cut_nic(self, server: int, port: int) -> None:
        """Pull the plug of one NIC: nothing gets through there, either way."""
        self._set_plugs({self._nic(server, port)}, pulled=True)

    def mend_nic(self, server: int, port: int) -> None:
        """Put it back."""
        self._set_plugs({self._nic(server, port)}, pulled=False)

    def carried(self) -> dict[str, tuple[int, int]]:
        """Bytes that each server has sent and was sent, what it passed on included, since the fabric was built."""
        totals = dict.fromkeys(self.rates, (0, 0))
        for (server, _), (sent, received) in self.carried_by_nic().items():
            before = totals[self.host(server)]
            totals[self.host(server)] = before[0] + sent, before[1] + received
        return totals

    def carried_by_nic(self) -> dict[tuple[int, int], tuple[int, int]]:
        """For each server and port, bytes that its NIC has sent and was sent, since the fabric was built."""
        from pyroute2 import IPRoute

        found = {}
        for namespace, nics in self._places(end for end in self._across if self._is_server(end)).items():
            with IPRoute(netns=namespace) as ip:
                links = _links(ip)
            for nic in nics:
                counts = links[self._name_of(nic)].get_attr("IFLA_STATS64")
                found[nic] = int(counts["tx_bytes"]), int(counts["rx_bytes"])
        return found

    def _set_plugs(self, nics: set[End], pulled: bool) -> None:
        from pyroute2 import IPRoute

        before = self._pulled
        self._pulled = before | nics if pulled else before - nics
        # A cable is cut as long as one of its plugs is pulled.
        was, now = ({end for nic in those for end in (nic, self._across[nic])} for those in (before, self._pulled))
        for namespace, ends in self._places(was ^ now).items():
            with IPRoute(netns=namespace) as ip:
                links = _links(ip)
                for end in ends:
                    index = links[self._name_of(end)]["index"]
                    # Not by taking the interface down: its routes and its address would go with it, the far server's
                    # too, where one cable leads from server to server.
                    if end in now:
                        ip.tc("replace", "blackhole", index)
                    else:
                        self._shape_end(ip, index, end)

    def _nics(self, server: int) -> set[End]:
        return {end for end in self._across if end[0] == server}

    def _nic(self, server: int, port: int) -> End:
        self.host(server)
        self.interface(port)
        return server, port

    # Building

    def _build(self) -> None:
        from pyroute2 import IPRoute, netns

        for namespace in (self._switch, *map(self.namespace, self.rates)):
            netns.create(namespace)
        self.forwards = _forward(list(map(self.namespace, self.rates)))
        with IPRoute(netns=self._switch) as switch:
            for bridge in sorted({self._bridge(end) for end in self._across if not self._is_server(end)}):
                switch.link("add", ifname=bridge, kind="bridge", br_stp_state=0, mtu=self._mtu)
            for node, port, other, other_port in self.net.cables:
                near, far = (
                    {"ifname": self._name_of(end), "net_ns_fd": self._place(end), "mtu": self._mtu}
                    for end in ((node, port), (other, other_port))
                )
                switch.link("add", kind="veth", peer=far, **near)
        for namespace, ends in self._places(self._across).items():
            with IPRoute(netns=namespace) as ip:
                self._set_up(ip, ends)

    def _set_up(self, ip: Any, ends: list[End]) -> None:
        """What is needed in a namespace, once the cables are there whose ends are in it."""
        indexes = {name: link["index"] for name, link in _links(ip).items()}
        ip.link("set", index=indexes["lo"], state="up")
        for end in ends:
            index = indexes[self._name_of(end)]
            if self._is_server(end):
                ip.addr("add", index=index, address=self.nic_address(*end), prefixlen=32)
                ip.link("set", index=index, state="up", gso_max_size=self._largest(self.rate))
            else:
                bridge = indexes[self._bridge(end)]
                ip.link("set", index=bridge, state="up")
                ip.link("set", index=index, master=bridge, state="up", gso_max_size=self._largest(self.rate))
            self._shape_end(ip, index, end)
        for server in {end[0] for end in ends if self._is_server(end)}:
            for there in self._across:
                if self._is_server(there) and there[0] != server:
                    self._add_route(ip, indexes, server, there)

    def _add_route(self, ip: Any, indexes: dict[str, int], server: int, there: End) -> None:
        """How a server sends to a NIC of another."""
        hops = self._hops(server, there)
        entered = next(end for end in map(self._across.__getitem__, hops) if self._is_server(end))
        if entered[0] == there[0]:
            how: dict[str, Any] = {"scope": "link"}
        else:
            how = {"gateway": self.nic_address(*entered), "flags": ["onlink"]}
        ip.route(
            "add",
            dst=f"{self.nic_address(*there)}/32",
            oif=indexes[self._name_of(hops[0])],
            prefsrc=self.nic_address(server, self._answered_at(server, hops[0][1], there)),
            metrics={"cc_algo": CONGESTION_CONTROL},
            **how,
        )

    def _answered_at(self, server: int, port: int, there: End) -> int:
        """The NIC whose address is given to who is sent something by that port: one for which answers come back by the
        same cable. If it can be, that with the number of the other's, so that what goes round a ring one way has other
        addresses, and so other queues, than what goes round the other way."""
        for candidate in sorted(range(self.net.ports), key=lambda each: (each != there[1], port ^ each)):
            if self._across[self._hops(there[0], (server, candidate))[-1]] == (server, port):
                return candidate
        return port  # the way back is another anyway

    def _shape_end(self, ip: Any, index: int, end: End) -> None:
        by = "destination" if self._is_server(end) else "source"
        peers = [self.nic_address(*nic) for nic in self._across if nic[0] in self._crossing.get(end, ())]
        self._shape(ip, index, self.rate, by, peers)

    @cached_property
    def _crossing(self) -> dict[End, set[int]]:
        """For each end of a cable: to whom all is that leaves there, where it is a server's, and from whom it is, where
        it is a switch's. The others need no queue there; and each takes its time to be built and looked through."""
        found: dict[End, set[int]] = {}
        for server, other in permutations(range(self.net.servers), 2):
            for port in range(self.net.ports):
                for hop in self._hops(server, (other, port)):
                    found.setdefault(hop, set()).add(other if self._is_server(hop) else server)
        return found

    def _hops(self, server: int, there: End) -> list[End]:
        """The route from a server to a NIC of another."""
        backwards = self.net.rings_both_ways and there[1] % 2
        return self.net.hops(server, there[0], -1 if backwards else 1)

    def _is_server(self, end: End) -> bool:
        return end[0] < self.net.servers

    def _places(self, ends: Iterable[End]) -> dict[str, list[End]]:
        """These ends by the namespaces that they are in."""
        found: dict[str, list[End]] = {}
        for end in ends:
            found.setdefault(self._place(end), []).append(end)
        return found

    def _place(self, end: End) -> str:
        return self.namespace(self.host(end[0])) if self._is_server(end) else self._switch

    def _name_of(self, end: End) -> str:
        """The interface that this end of a cable is. The kernel takes names of at most 15 characters."""
        return self.interface(end[1]) if self._is_server(end) else f"port{end[0] - self.net.servers}-{end[1]}"

    def _bridge(self, end: End) -> str:
        """The bridge that the switch at this end of a cable is."""
        return f"switch{end[0] - self.net.servers}"


def _forward(namespaces: list[str]) -> bool:
    """Have the kernel pass on, in these namespaces, what is for others. False if that is not ours to say."""

    def write() -> None:
        for namespace in namespaces:
            enter(namespace)
            for name, value in FORWARDING.items():
                (SETTINGS / name).write_text(value)

    with ThreadPoolExecutor(1) as thread:  # which never comes back from where it entered, and so must not be ours
        try:
            thread.submit(write).result()
        except OSError:
            return False
    return True


def _links(ip: Any) -> dict[str, Any]:
    """The interfaces of a namespace, by name."""
    return {link.get_attr("IFLA_IFNAME"): link for link in ip.get_links()}
