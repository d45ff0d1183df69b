"""A fabric: a lab whose servers have several NICs, connected as a topology says, by switches or directly.

Each server is a network namespace, and each of its NICs is an interface in it. The switches are bridges, all in one
namespace. A cable is a veth pair whose two ends are shaped as in a lab.

    with Fabric(BCube(2, 2), 12.5e6) as fabric:                       # bytes per second of every NIC, each direction
        fabric.start(fabric.host(1), serve, fabric.nic_address(1, 0))
        fabric.call(fabric.host(0), push, fabric.nic_address(1, 0))

Packets to a NIC follow the routes of the topology. Where no cable connects two servers, the servers between them
forward packets. In a ring of two, two cables lead to the same server: packets for its even ports go forwards over the
first cable, and packets for its odd ports backwards over the second. Answers come back over the same cable.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import permutations
from pathlib import Path
from typing import Any, TypeAlias

from paceline.collectives.topology import Topology
from paceline.lab.namespaces import Lab, LabError
from paceline.lab.netns_exec import enter
from paceline.lab.shaping import CONGESTION_CONTROL, largest_packet, mtu_for, shape

SETTINGS = Path("/proc/sys/net/ipv4")
#: Servers forward packets. The way back may differ from the way there, which rp_filter would forbid.
FORWARDING = {"ip_forward": "1", "conf/all/rp_filter": "0", "conf/default/rp_filter": "0"}

End: TypeAlias = tuple[int, int]  # an end of a cable: node, port


class Fabric(Lab):
    """A lab of servers with several NICs, connected as a topology says."""

    forwards = False  # whether servers forward packets; set when the fabric is built, since a container may forbid it

    def __init__(self, net: Topology, rate: float) -> None:
        """rate: the bytes per second of every NIC in each direction, unless the network has rates of its own."""
        if any(min(cable.node, cable.other) >= net.servers for cable in net.cables):
            raise LabError(f"A fabric cannot have cables between switches, as {net.name} has: use a BCube or a torus.")
        rates = net.level_rates(rate)
        super().__init__({f"server{server}": rates[0] for server in range(net.servers)})  # that of the first NIC
        self.net, self._mtu = net, mtu_for(rates)
        self._across: dict[End, End] = {}  # the other end of each cable
        self._rates: dict[End, float] = {}
        for cable in net.cables:
            node, port, other, other_port = cable
            self._rates[node, port] = self._rates[other, other_port] = rates[net.cable_level(cable)]
            self._across[node, port] = other, other_port
            self._across[other, other_port] = node, port
        self._unplugged: set[End] = set()

    def host(self, server: int) -> str:
        """Return the name of a server as a host of the lab."""
        host = f"server{server}"
        self._number(host)
        return host

    def interface(self, port: int) -> str:
        """Return the name of a port's interface on its server."""
        if not 0 <= port < self.net.ports:
            raise LabError(f"There is no port {port} in this fabric; a server has {self.net.ports}.")
        return f"eth{port}"

    def nic_address(self, server: int, port: int) -> str:
        """Return the address at which all other servers reach a NIC."""
        self._nic(server, port)
        return f"10.{port}.{server >> 8}.{(server & 255) + 1}"

    def address(self, host: str) -> str:
        """Return the address of a server's first NIC."""
        return self.nic_address(self._number(host), 0)

    # Cables

    def cut(self, host: str) -> None:
        """Cut all links of a server, in both directions."""
        self._set_plugs(self._nics(self._number(host)), unplugged=True)

    def mend(self, host: str) -> None:
        """Restore all links of a server."""
        self._set_plugs(self._nics(self._number(host)), unplugged=False)

    def cut_nic(self, server: int, port: int) -> None:
        """Cut the link of one NIC, in both directions."""
        self._set_plugs({self._nic(server, port)}, unplugged=True)

    def mend_nic(self, server: int, port: int) -> None:
        """Restore the link of one NIC."""
        self._set_plugs({self._nic(server, port)}, unplugged=False)

    def carried(self) -> dict[str, tuple[int, int]]:
        """Return the bytes, forwarded ones included, that each server has sent and received since the start."""
        totals = dict.fromkeys(self.rates, (0, 0))
        for (server, _), (sent, received) in self.carried_by_nic().items():
            before = totals[self.host(server)]
            totals[self.host(server)] = before[0] + sent, before[1] + received
        return totals

    def carried_by_nic(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Return the bytes that each NIC, by server and port, has sent and received since the fabric was built."""
        from pyroute2 import IPRoute

        found = {}
        for namespace, nics in self._by_namespace(end for end in self._across if self._is_server(end)).items():
            with IPRoute(netns=namespace) as ip:
                links = _links(ip)
            for nic in nics:
                counts = links[self._interface_of(nic)].get_attr("IFLA_STATS64")
                found[nic] = int(counts["tx_bytes"]), int(counts["rx_bytes"])
        return found

    def _set_plugs(self, nics: set[End], unplugged: bool) -> None:
        """Unplug these NICs, or plug them in. A cable is cut while one of its ends is unplugged."""
        from pyroute2 import IPRoute

        before = self._unplugged
        self._unplugged = before | nics if unplugged else before - nics
        were_cut, are_cut = (
            {end for nic in unplugged_nics for end in (nic, self._across[nic])}
            for unplugged_nics in (before, self._unplugged)
        )
        for namespace, ends in self._by_namespace(were_cut ^ are_cut).items():
            with IPRoute(netns=namespace) as ip:
                links = _links(ip)
                for end in ends:
                    index = links[self._interface_of(end)]["index"]
                    # The interface stays up. Taking it down would remove its routes and its address, and also those of
                    # the server at the other end of a direct cable.
                    if end in are_cut:
                        ip.tc("replace", "blackhole", index)
                    else:
                        self._shape_end(ip, index, end)

    def _nics(self, server: int) -> set[End]:
        return {end for end in self._across if end[0] == server}

    def _nic(self, server: int, port: int) -> End:
        """Return a NIC as the end of a cable. Raise LabError if there is no such NIC."""
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
                    {"ifname": self._interface_of(end), "net_ns_fd": self._namespace_of(end), "mtu": self._mtu}
                    for end in ((node, port), (other, other_port))
                )
                switch.link("add", kind="veth", peer=far, **near)
        for namespace, ends in self._by_namespace(self._across).items():
            with IPRoute(netns=namespace) as ip:
                self._set_up(ip, ends)

    def _set_up(self, ip: Any, ends: list[End]) -> None:
        """Set up the interfaces and routes of a namespace. ends: the ends of cables in it."""
        indexes = {name: link["index"] for name, link in _links(ip).items()}
        ip.link("set", index=indexes["lo"], state="up")
        for end in ends:
            largest = largest_packet(self._rates[end], self._mtu)
            index = indexes[self._interface_of(end)]
            if self._is_server(end):
                ip.addr("add", index=index, address=self.nic_address(*end), prefixlen=32)
                ip.link("set", index=index, state="up", gso_max_size=largest)
            else:
                bridge = indexes[self._bridge(end)]
                ip.link("set", index=bridge, state="up")
                ip.link("set", index=index, master=bridge, state="up", gso_max_size=largest)
            self._shape_end(ip, index, end)
        for server in {end[0] for end in ends if self._is_server(end)}:
            for there in self._across:
                if self._is_server(there) and there[0] != server:
                    self._add_route(ip, indexes, server, there)

    def _add_route(self, ip: Any, indexes: dict[str, int], server: int, there: End) -> None:
        """Add a server's route to a NIC of another server."""
        hops = self._hops(server, there)
        entered = next(end for end in map(self._across.__getitem__, hops) if self._is_server(end))
        if entered[0] == there[0]:
            how: dict[str, Any] = {"scope": "link"}
        else:
            how = {"gateway": self.nic_address(*entered), "flags": ["onlink"]}
        ip.route(
            "add",
            dst=f"{self.nic_address(*there)}/32",
            oif=indexes[self._interface_of(hops[0])],
            prefsrc=self.nic_address(server, self._source_port(server, hops[0][1], there)),
            metrics={"cc_algo": CONGESTION_CONTROL},
            **how,
        )

    def _source_port(self, server: int, port: int, there: End) -> int:
        """Return the NIC whose address a server uses as the source of packets that it sends through `port`.

        Answers to that address come back over the same cable. If possible, the NIC has the number of the destination's
        NIC. Then the two directions of a ring have different addresses, and so different queues.
        """
        for candidate in sorted(range(self.net.ports), key=lambda each: (each != there[1], port ^ each)):
            if self._across[self._hops(there[0], (server, candidate))[-1]] == (server, port):
                return candidate
        return port  # no answer comes back over this cable

    def _shape_end(self, ip: Any, index: int, end: End) -> None:
        """Shape one end of a cable, with a queue for each peer whose packets pass it."""
        by = "destination" if self._is_server(end) else "source"
        peers = [self.nic_address(*nic) for nic in self._across if nic[0] in self._crossing.get(end, ())]
        shape(ip, index, self._rates[end], self._mtu, by, peers)

    @cached_property
    def _crossing(self) -> dict[End, set[int]]:
        """The peers whose packets leave through each end of a cable.

        At a server's end they are the packets' destinations, at a switch's end their sources. Only these peers need a
        queue there. Fewer queues are faster to build and to search.
        """
        found: dict[End, set[int]] = {}
        for server, other in permutations(range(self.net.servers), 2):
            for port in range(self.net.ports):
                for hop in self._hops(server, (other, port)):
                    found.setdefault(hop, set()).add(other if self._is_server(hop) else server)
        return found

    def _hops(self, server: int, there: End) -> list[End]:
        """Return the route from a server to a NIC of another, as the ends of cables through which packets leave."""
        backwards = self.net.rings_both_ways and there[1] % 2
        return self.net.hops(server, there[0], -1 if backwards else 1)

    def _is_server(self, end: End) -> bool:
        return end[0] < self.net.servers

    def _by_namespace(self, ends: Iterable[End]) -> dict[str, list[End]]:
        """Group ends of cables by their namespaces."""
        found: dict[str, list[End]] = {}
        for end in ends:
            found.setdefault(self._namespace_of(end), []).append(end)
        return found

    def _namespace_of(self, end: End) -> str:
        return self.namespace(self.host(end[0])) if self._is_server(end) else self._switch

    def _interface_of(self, end: End) -> str:
        """Return the interface at an end of a cable. The kernel allows names of at most 15 characters."""
        return self.interface(end[1]) if self._is_server(end) else f"port{end[0] - self.net.servers}-{end[1]}"

    def _bridge(self, end: End) -> str:
        """Return the bridge of the switch at an end of a cable."""
        return f"switch{end[0] - self.net.servers}"


def _forward(namespaces: list[str]) -> bool:
    """Turn on packet forwarding in these namespaces. Return False if the kernel does not permit it."""

    def write() -> None:
        for namespace in namespaces:
            enter(namespace)
            for name, value in FORWARDING.items():
                (SETTINGS / name).write_text(value)

    with ThreadPoolExecutor(1) as thread:  # a thread of its own, since it stays in the namespace that it enters
        try:
            thread.submit(write).result()
        except OSError:
            return False
    return True


def _links(ip: Any) -> dict[str, Any]:
    """Return the interfaces of a namespace, by name."""
    return {link.get_attr("IFLA_IFNAME"): link for link in ip.get_links()}
