"""A lab: several hosts with real, separately limited, full-duplex links on one Linux machine.

Each host is a network namespace. A veth pair connects it to a switch, which is a bridge in a namespace of its own. Both
ends of the pair are shaped: one limits what the host sends, the other what it receives. Nothing of the lab is visible
from outside, and it disappears with its namespaces. A lab needs root.

    with Lab({"server": 50e6, "worker": 50e6}) as lab:      # bytes per second, each direction
        lab.start("server", serve, lab.address("server"))    # a function, in a process on that host
        lab.call("worker", push, lab.address("server"))      # returns what the function returns
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, Self

from paceline.lab import host_process, leftovers
from paceline.lab.host_process import Command
from paceline.lab.shaping import CONGESTION_CONTROL, largest_packet, mtu_for, shape

NETWORK = "10.0.0.0/16"
MAX_HOSTS = 250
STOPPING = 3.0  # seconds that a process may take to end before it is killed

_lab_numbers = itertools.count()


class LabError(RuntimeError):
    """A lab cannot be built, or something in it failed. The message says what to do."""


def check() -> None:
    """Raise LabError if a lab cannot be built on this machine."""
    if not sys.platform.startswith("linux"):
        raise LabError("A lab is made of Linux network namespaces: run it on Linux, or use paceline simulate.")
    try:
        import pyroute2  # noqa: F401
    except ImportError:
        raise LabError("A lab needs pyroute2: pip install 'paceline[lab]'.") from None
    if os.geteuid() != 0:
        raise LabError("A lab needs root to create network namespaces: run it with sudo, or use paceline simulate.")


class Lab:
    """Hosts on a switch. Use it as a context manager, so that it is always removed."""

    def __init__(self, rates: Mapping[str, float]) -> None:
        """rates: for each host, the bytes per second of its link in each direction."""
        check()
        if not 0 < len(rates) <= MAX_HOSTS:
            raise LabError(f"A lab has 1 to {MAX_HOSTS} hosts; got {len(rates)}.")
        self.rates = dict(rates)
        self._numbers = {host: number for number, host in enumerate(rates)}
        self._name = leftovers.lab_name(next(_lab_numbers))
        self._mtu = mtu_for(rates.values())
        self._processes: list[BaseProcess | Command] = []

    def __enter__(self) -> Self:
        leftovers.sweep()
        try:
            self._build()
        except BaseException as error:
            self.close()
            from pyroute2.netlink.exceptions import NetlinkError

            if isinstance(error, NetlinkError | PermissionError):
                raise LabError(
                    f"The kernel refused to build a part of the lab: {error}. A container may lack the permission."
                ) from None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop every process of the lab, and remove its namespaces."""
        self.stop(list(self._processes))
        leftovers.remove(self._name)

    def address(self, host: str) -> str:
        """Return the address at which the other hosts reach this one."""
        return f"10.0.{self._number(host) >> 8}.{(self._number(host) & 255) + 1}"

    def namespace(self, host: str) -> str:
        """Return the name of a host's namespace."""
        self._number(host)
        return f"{self._name}-{host}"

    # Processes

    def start(self, host: str, function: Callable[..., object], *arguments: Any, name: str = "") -> BaseProcess:
        """Call a function in a new process on a host. The process is forked from one that has loaded torch."""
        process: BaseProcess = host_process.context().Process(
            target=host_process.run_in, args=(self.namespace(host), function, arguments), name=name or host
        )
        process.start()
        self._processes.append(process)
        return process

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on a host."""
        return [sys.executable, "-m", "paceline.lab.netns_exec", self.namespace(host), *command]

    def spawn(self, host: str, command: Sequence[str], environment: Mapping[str, str]) -> Command:
        """Run a command on a host. Its output goes to the standard error of this process."""
        spawned = Command(
            subprocess.Popen(self.command(host, command), env=dict(environment), stdout=sys.stderr.fileno()), host
        )
        self._processes.append(spawned)
        return spawned

    def pipe(self) -> tuple[Any, Any]:
        """Return the two ends of a pipe: one to keep, and one to pass to a new process."""
        ours, theirs = host_process.context().Pipe()
        return ours, theirs

    def stop(self, processes: Sequence[BaseProcess | Command]) -> None:
        """Terminate these processes of the lab, and kill those that do not end in time."""
        for process in processes:
            process.terminate()
        end = time.monotonic() + STOPPING
        for process in processes:
            host_process.wait_or_kill(process, max(0.0, end - time.monotonic()))
            self._processes.remove(process)

    def call(self, host: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in a new process on a host, and return its result."""
        return self.calls([(host, function, arguments)])[0]

    def calls(self, what: Sequence[tuple[str, Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
        """Call functions at the same time, each on its host, and return their results."""
        pipes = []
        for host, function, arguments in what:
            ours, theirs = self.pipe()
            pipes.append((host, ours, self.start(host, host_process.answer, theirs, function, arguments)))
            theirs.close()
        results = []
        for host, pipe, process in pipes:
            try:
                succeeded, result = pipe.recv()
            except EOFError:
                process.join()
                raise LabError(f"A function on {host} ended with exit code {process.exitcode}.") from None
            if not succeeded:
                raise LabError(f"A function on {host} failed: {result}")
            results.append(result)
            process.join()
        return results

    # Links

    def cut(self, host: str) -> None:
        """Cut the link of a host, in both directions."""
        self._set_port(host, "down")

    def mend(self, host: str) -> None:
        """Restore the link of a host."""
        self._set_port(host, "up")

    def carried(self) -> dict[str, tuple[int, int]]:
        """Return the bytes that each host has sent and received since the lab was built."""
        from pyroute2 import IPRoute

        with IPRoute(netns=self._switch) as switch:
            ports = {link.get_attr("IFLA_IFNAME"): link.get_attr("IFLA_STATS64") for link in switch.get_links()}
        return {
            host: (int(ports[_port(number)]["rx_bytes"]), int(ports[_port(number)]["tx_bytes"]))
            for host, number in self._numbers.items()
        }

    def _set_port(self, host: str, state: str) -> None:
        from pyroute2 import IPRoute

        with IPRoute(netns=self._switch) as switch:
            switch.link("set", index=_index(switch, _port(self._number(host))), state=state)

    # Building

    @property
    def _switch(self) -> str:
        return f"{self._name}-switch"

    def _number(self, host: str) -> int:
        """Return the number of a host. Raise LabError if there is no such host."""
        try:
            return self._numbers[host]
        except KeyError:
            raise LabError(
                f"There is no host {host!r} in this lab; its hosts are {', '.join(self._numbers)}."
            ) from None

    def _build(self) -> None:
        from pyroute2 import IPRoute, netns

        addresses = [self.address(host) for host in self._numbers]
        netns.create(self._switch)
        with IPRoute(netns=self._switch) as switch:
            switch.link("add", ifname="switch", kind="bridge", br_stp_state=0, mtu=self._mtu)
            bridge = _index(switch, "switch")
            switch.link("set", index=bridge, state="up")
            for host, number in self._numbers.items():
                netns.create(self.namespace(host))
                peer = {"ifname": "eth0", "net_ns_fd": self.namespace(host), "mtu": self._mtu}
                switch.link("add", ifname=_port(number), kind="veth", peer=peer, mtu=self._mtu)
                port = _index(switch, _port(number))
                largest = largest_packet(self.rates[host], self._mtu)
                switch.link("set", index=port, master=bridge, state="up", gso_max_size=largest)
                shape(switch, port, self.rates[host], self._mtu, "source", addresses)
                with IPRoute(netns=self.namespace(host)) as inside:
                    inside.link("set", index=_index(inside, "lo"), state="up")
                    eth0 = _index(inside, "eth0")
                    inside.link("set", index=eth0, state="up", gso_max_size=largest)
                    inside.addr("add", index=eth0, address=self.address(host), prefixlen=16)
                    # The route sets the congestion control, because not every namespace may change the setting. cubic
                    # is the default of most machines, so that figures from two machines can be compared. bbr may pause
                    # for long if it does not have its own queue.
                    inside.route(
                        "replace",
                        dst=NETWORK,
                        oif=eth0,
                        proto="kernel",
                        scope="link",
                        prefsrc=self.address(host),
                        metrics={"cc_algo": CONGESTION_CONTROL},
                    )
                    shape(inside, eth0, self.rates[host], self._mtu, "destination", addresses)


def _port(number: int) -> str:
    """Return the switch's interface to a host."""
    return f"port{number}"


def _index(ip: Any, name: str) -> int:
    """Return the index of an interface."""
    return int(ip.link_lookup(ifname=name)[0])
