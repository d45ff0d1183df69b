"""A lab: several hosts with true, separately limited, full-duplex links, on one Linux machine.

Each host is a network namespace. A veth pair joins it to a switch, which is a bridge in a namespace of its own, and
both ends of the pair are shaped: what the host sends, and what it is sent. Nothing of it is seen from outside, and when
the namespaces go, all of it goes. Needs root.

    with Lab({"server": 50e6, "worker": 50e6}) as lab:      # bytes per second, each direction
        lab.start("server", serve, lab.address("server"))    # a process on that host
        lab.call("worker", push, lab.address("server"))      # what it returns

The shaper is a token bucket (HTB) with a queue for each peer under it, served in turns, so that flows share a link
evenly and the rate is the rate. What goes to and from port SPARSE has a queue before those, as it would have under
fq_codel, which not every kernel has. A flow is never split between queues: what is overtaken by its own
acknowledgements is too old for TCP, which drops it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

NETWORK = "10.0.0.0/16"
CONGESTION_CONTROL = "cubic"
JUMBO, ETHERNET = 9000, 1500  # the largest packet, on links that are fast and on others
FAST = 12.5e6  # bytes per second from which on a link is fast: below, a jumbo frame alone would take over 0.7 ms
HEADER = 14  # bytes of a frame besides its packet
LARGEST = 0.001  # seconds that the largest packet takes: the kernel hands on several frames as one, to save its time
MAX_AT_ONCE = 1 << 16  # bytes: the kernel's own limit
OWN = 1000.0  # bytes per second of a queue's own
SPARSE = 7000  # a port that little is said over, such as a coordinator's
NAMESPACES = Path("/run/netns")
MAX_HOSTS = 250
STOPPING = 3.0  # seconds that a process has to end before it is killed

_numbers = itertools.count()


class LabError(RuntimeError):
    """There can be no lab here. The message says what to do."""


def check() -> None:
    """LabError if there can be no lab here."""
    if not sys.platform.startswith("linux"):
        raise LabError("A lab is made of Linux network namespaces: run it on Linux, or use paceline simulate.")
    try:
        import pyroute2  # noqa: F401
    except ImportError:
        raise LabError("A lab needs pyroute2: pip install 'paceline[lab]'.") from None
    if os.geteuid() != 0:
        raise LabError("A lab needs root, to make network namespaces: run it with sudo, or use paceline simulate.")


class Command:
    """A command that runs on a host, with what a process of the lab can be asked."""

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        self._process, self.name, self.pid = process, name, process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def join(self, seconds: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


class Lab:
    """Hosts on a switch. Use it as a context manager: it is always torn down."""

    def __init__(self, rates: Mapping[str, float]) -> None:
        """rates: for each host, bytes per second of its link, each direction."""
        check()
        if not 0 < len(rates) <= MAX_HOSTS:
            raise LabError(f"A lab has 1 to {MAX_HOSTS} hosts, not {len(rates)}.")
        self.rates = dict(rates)
        self._numbers = {host: number for number, host in enumerate(rates)}
        self._name = f"paceline-{os.getpid()}-{_born(os.getpid())}-{next(_numbers)}"
        self._mtu = JUMBO if min(rates.values()) >= FAST else ETHERNET
        self._processes: list[BaseProcess | Command] = []

    def __enter__(self) -> Self:
        sweep()
        try:
            self._build()
        except BaseException as error:
            self.close()
            from pyroute2.netlink.exceptions import NetlinkError

            if isinstance(error, NetlinkError | PermissionError):
                raise LabError(
                    f"The kernel refuses a part of the lab: {error}; a container may lack the right."
                ) from None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop every process of the lab, and take it down."""
        self.stop(list(self._processes))
        _remove(self._name)

    def address(self, host: str) -> str:
        """Where a host is reached from the others."""
        return f"10.0.{self._number(host) >> 8}.{(self._number(host) & 255) + 1}"

    def namespace(self, host: str) -> str:
        """The name of the namespace that the host is."""
        self._number(host)
        return f"{self._name}-{host}"

    # Processes

    def start(self, host: str, function: Callable[..., object], *arguments: Any, name: str = "") -> BaseProcess:
        """Call a function in a process of its own on that host. It is forked from one that has torch loaded."""
        process: BaseProcess = _context().Process(
            target=_inside, args=(self.namespace(host), function, arguments), name=name or host
        )
        process.start()
        self._processes.append(process)
        return process

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """The command line by which a command is run on that host."""
        return [sys.executable, "-m", "paceline.lab.netns_exec", self.namespace(host), *command]

    def spawn(self, host: str, command: Sequence[str], environment: Mapping[str, str]) -> Command:
        """Run a command on that host. What it prints goes to our standard error."""
        spawned = Command(
            subprocess.Popen(self.command(host, command), env=dict(environment), stdout=sys.stderr.fileno()), host
        )
        self._processes.append(spawned)
        return spawned

    def pipe(self) -> tuple[Any, Any]:
        """Two ends, one to keep and one for a process to start."""
        ours, theirs = _context().Pipe()
        return ours, theirs

    def stop(self, processes: Sequence[BaseProcess | Command]) -> None:
        """End these processes of the lab."""
        for process in processes:
            process.terminate()
        end = time.monotonic() + STOPPING
        for process in processes:
            _wait(process, max(0.0, end - time.monotonic()))
            self._processes.remove(process)

    def call(self, host: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function returns on that host."""
        return self.calls([(host, function, arguments)])[0]

    def calls(self, what: Sequence[tuple[str, Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
        """What functions return, all called at the same time, each on its host."""
        pipes = []
        for host, function, arguments in what:
            ours, theirs = self.pipe()
            pipes.append((host, ours, self.start(host, _answer, theirs, function, arguments)))
            theirs.close()
        results = []
        for host, pipe, process in pipes:
            try:
                good, result = pipe.recv()
            except EOFError:
                process.join()
                raise LabError(f"What ran on {host} ended with exit code {process.exitcode}.") from None
            if not good:
                raise LabError(f"What ran on {host} failed: {result}")
            results.append(result)
            process.join()
        return results

    # Links

    def cut(self, host: str) -> None:
        """Pull the plug of a host: nothing gets through, either way."""
        self._set_port(host, "down")

    def mend(self, host: str) -> None:
        """Put the plug back."""
        self._set_port(host, "up")

    def carried(self) -> dict[str, tuple[int, int]]:
        """Bytes that each host has sent and was sent, since the lab was built."""
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
        try:
            return self._numbers[host]
        except KeyError:
            raise LabError(f"There is no host {host!r} in this lab; there are {', '.join(self._numbers)}.") from None

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
                largest = self._largest(self.rates[host])
                switch.link("set", index=port, master=bridge, state="up", gso_max_size=largest)
                self._shape(switch, port, self.rates[host], "source", addresses)
                with IPRoute(netns=self.namespace(host)) as inside:
                    inside.link("set", index=_index(inside, "lo"), state="up")
                    eth0 = _index(inside, "eth0")
                    inside.link("set", index=eth0, state="up", gso_max_size=largest)
                    inside.addr("add", index=eth0, address=self.address(host), prefixlen=16)
                    # By the route, since the setting is not every namespace's to change. It is what most machines have,
                    # so that figures from two can be compared; and bbr, without its own queue, may pause for long.
                    inside.route(
                        "replace",
                        dst=NETWORK,
                        oif=eth0,
                        proto="kernel",
                        scope="link",
                        prefsrc=self.address(host),
                        metrics={"cc_algo": CONGESTION_CONTROL},
                    )
                    self._shape(inside, eth0, self.rates[host], "destination", addresses)

    def _shape(self, ip: Any, index: int, rate: float, by: str, addresses: Sequence[str]) -> None:
        """A token bucket, and under it a queue for what is sparse and one for each of these peers. by: what of a packet
        is the peer's address, "source" or "destination"."""
        frame = self._mtu + HEADER
        burst = max(2 * frame, int(rate * 0.0005))  # half a millisecond
        # A queue's turn is as long as the largest packet: with less, packets would be shared evenly, and not bytes.
        quantum = self._largest(rate)
        link = {"rate": _bits(rate), "ceil": _bits(rate), "burst": burst, "cburst": burst, "quantum": quantum}
        # A queue's own rate is next to nothing: what it sends it must borrow, or the queues' bursts would add up.
        queue = link | {"rate": _bits(OWN), "burst": frame}
        ip.tc("replace", "htb", index, handle="1:", default=2)
        ip.tc("add-class", "htb", index, handle="1:1", parent="1:", **link)
        ip.tc("add-class", "htb", index, handle="1:2", parent="1:1", prio=0, **queue)
        where = {"source": 12, "destination": 16}[by]  # in the IP header
        for key in (f"{SPARSE << 16:#010x}/0xffff0000+20", f"{SPARSE:#010x}/0x0000ffff+20"):
            ip.tc("add-filter", "u32", index, parent="1:", prio=1, protocol=0x0800, target="1:2", keys=[key])
        for number, address in enumerate(addresses):
            handle = f"1:{number + 16:x}"
            ip.tc("add-class", "htb", index, handle=handle, parent="1:1", prio=1, **queue)
            key = "0x" + "".join(f"{int(part):02x}" for part in address.split(".")) + f"/0xffffffff+{where}"
            ip.tc("add-filter", "u32", index, parent="1:", prio=2, protocol=0x0800, target=handle, keys=[key])

    def _largest(self, rate: float) -> int:
        """Bytes that the kernel may hand on at once on a link of that rate."""
        frame = self._mtu + HEADER
        return frame * min(max(2, round(rate * LARGEST / frame)), MAX_AT_ONCE // frame)


def sweep() -> list[str]:
    """Remove what is left of labs whose process is gone; their names."""
    found: dict[str, bool] = {}
    for name in os.listdir(NAMESPACES) if NAMESPACES.is_dir() else ():
        parsed = re.fullmatch(r"(paceline-(\d+)-(\d+)-\d+)-.+", name)
        if parsed:
            found[parsed[1]] = _born(int(parsed[2])) == parsed[3]
    gone = [lab for lab, alive in found.items() if not alive]
    for lab in gone:
        _remove(lab)
    return gone


def _remove(lab: str) -> None:
    """Remove the namespaces of a lab, and end what still runs in them."""
    from pyroute2 import netns

    names = [name for name in os.listdir(NAMESPACES) if name.startswith(f"{lab}-")] if NAMESPACES.is_dir() else []
    inodes = {(NAMESPACES / name).stat().st_ino for name in names}
    for process in os.listdir("/proc"):
        if process.isdecimal() and int(process) != os.getpid():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{process}/ns/net").st_ino in inodes:
                    os.kill(int(process), signal.SIGKILL)
    for name in names:
        with contextlib.suppress(OSError):
            netns.remove(name)


def _born(pid: int) -> str:
    """When a process began, in the kernel's ticks; empty if there is none. With its number it is one of a kind."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def _port(number: int) -> str:
    return f"port{number}"


def _bits(rate: float) -> str:
    return f"{round(8 * rate)}bit"


def _index(ip: Any, name: str) -> int:
    return int(ip.link_lookup(ifname=name)[0])


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paceline.lab.preload"])
    return context


def _inside(namespace: str, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    from paceline.lab.netns_exec import enter

    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the one who built the lab, who ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not (NAMESPACES / namespace).exists():
        return  # the lab was taken down before this process was up
    enter(namespace)
    with contextlib.suppress(BrokenPipeError):  # likewise
        function(*arguments)


def _die_with_parent() -> None:
    """If whoever built the lab is killed, nothing of it goes on."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _answer(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        answer = (True, function(*arguments))
    except Exception as error:
        answer = (False, f"{type(error).__name__}: {error}")
    with contextlib.suppress(OSError):  # whoever asked may be gone
        pipe.send(answer)


def _wait(process: BaseProcess | Command, seconds: float) -> None:
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
