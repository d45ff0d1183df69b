"""Shapes one end of a link: the rate, the size of packets, and how flows share the link.

The shaper is a token bucket (HTB). Under it there is one queue for each peer, and the queues take turns. So flows share
a link evenly, and their total is the rate of the link. Packets to and from port SPARSE have a queue that is served
first, as fq_codel would do; not every kernel has fq_codel. A flow is never split between queues: if acknowledgements
overtook the data of their own connection, TCP would drop the data as too old.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

CONGESTION_CONTROL = "cubic"
JUMBO, ETHERNET = 9000, 1500  # MTU of fast links and of other links
FAST = 12.5e6  # bytes per second of a fast link; on a slower one, a jumbo frame would take more than 0.7 ms
HEADER = 14  # bytes of an Ethernet header
LARGEST = 0.001  # seconds that the largest packet takes; the kernel passes on several frames as one, to save CPU time
MAX_AT_ONCE = 1 << 16  # bytes; the kernel's limit for one such packet
OWN = 1000.0  # bytes per second that are guaranteed to a single queue
SPARSE = 7000  # a port with little traffic, such as a coordinator's


def mtu_for(rates: Iterable[float]) -> int:
    """Return the MTU of a network whose links have these rates."""
    return JUMBO if min(rates) >= FAST else ETHERNET


def largest_packet(rate: float, mtu: int) -> int:
    """Return the number of bytes that the kernel may pass on as one packet on a link of this rate."""
    frame = mtu + HEADER
    return frame * min(max(2, round(rate * LARGEST / frame)), MAX_AT_ONCE // frame)


def shape(ip: Any, index: int, rate: float, mtu: int, by: str, peers: Sequence[str]) -> None:
    """Limit what an interface sends to a rate, and give each peer a queue of its own.

    ip: a pyroute2 connection to the namespace of the interface. by: the field of a packet that holds the peer's
    address, "source" or "destination". peers: their addresses.
    """
    frame = mtu + HEADER
    burst = max(2 * frame, int(rate * 0.0005))  # half a millisecond
    # The turn of a queue is as long as the largest packet. With shorter turns, queues would share packets evenly
    # instead of bytes.
    quantum = largest_packet(rate, mtu)
    link = {"rate": _bits(rate), "ceil": _bits(rate), "burst": burst, "cburst": burst, "quantum": quantum}
    # A queue has almost no rate of its own, so it borrows from the link. Otherwise the bursts of all queues would add
    # up to more than the link.
    queue = link | {"rate": _bits(OWN), "burst": frame}
    ip.tc("replace", "htb", index, handle="1:", default=2)
    ip.tc("add-class", "htb", index, handle="1:1", parent="1:", **link)
    ip.tc("add-class", "htb", index, handle="1:2", parent="1:1", prio=0, **queue)
    offset = {"source": 12, "destination": 16}[by]  # in the IP header
    for key in (f"{SPARSE << 16:#010x}/0xffff0000+20", f"{SPARSE:#010x}/0x0000ffff+20"):
        ip.tc("add-filter", "u32", index, parent="1:", prio=1, protocol=0x0800, target="1:2", keys=[key])
    for number, address in enumerate(peers):
        handle = f"1:{number + 16:x}"
        ip.tc("add-class", "htb", index, handle=handle, parent="1:1", prio=1, **queue)
        key = "0x" + "".join(f"{int(part):02x}" for part in address.split(".")) + f"/0xffffffff+{offset}"
        ip.tc("add-filter", "u32", index, parent="1:", prio=2, protocol=0x0800, target=handle, keys=[key])


def _bits(rate: float) -> str:
    """Return a rate in bytes per second as tc writes it."""
    return f"{round(8 * rate)}bit"
