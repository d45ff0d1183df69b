"""Table 3 of the HiPS paper: GST, the time of one synchronization, in closed form.

The paper counts bytes alone. Here each step also costs the latency, if one is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.collectives.algorithms import ALIASES, AlgorithmError, algorithm_named, stages_of
from paceline.collectives.topology import BCube, Topology, Torus


@dataclass(frozen=True)
class Formula:
    """A calculated time, in seconds.

    exact: a synchronization takes exactly this long. Otherwise it is a lower bound or, with latency, an estimate.
    """

    seconds: float
    exact: bool = True


def gst(
    net: Topology, algorithm: str, size: float, rate: float, latency: float = 0.0, stages: Sequence[str] = ("ring",)
) -> Formula | None:
    """Return the GST of `size` bytes (W) over NICs of this rate (B).

    Return None where there is no formula: table 3 covers BCube and Torus.
    """
    algorithm = ALIASES.get(algorithm, algorithm)
    if not isinstance(net, BCube | Torus):
        return None
    count = net.servers  # N
    both = len(net.directions)
    if algorithm == "hips":
        return _hips(net, size, rate, latency, stages_of(net, stages))
    if algorithm == "ring":
        seconds = 2 * (count - 1) / count * size / (both * rate)
        return Formula(seconds + 2 * (count - 1) * latency, exact=len(set(net.sizes)) == 1)
    if algorithm == "rings":
        algorithm_named(algorithm, net)  # raises AlgorithmError if there are none
        seconds = 2 * (count - 1) / count * size / (both * net.levels * rate)
        return Formula(seconds + 2 * (count - 1) * latency)
    if algorithm == "mesh":  # on a torus a lower bound: at best it is a BCube with links twice as fast
        largest = max(net.sizes)
        seconds = 2 * (largest - 1) / largest * size / (both * rate)
        return Formula(seconds + 2 * net.levels * latency, exact=isinstance(net, BCube) and not latency)
    if algorithm == "ps":  # all NICs of the one server, if they were used evenly
        return Formula(2 * (count - 1) * size / (net.ports * rate) + 2 * latency, exact=False)
    raise AlgorithmError(f"There is no formula for {algorithm!r}.")


def _hips(net: Topology, size: float, rate: float, latency: float, stages: Sequence[str]) -> Formula:
    """Return the time of the slowest process. Each process begins at a different level."""
    lanes = net.ports
    slowest = 0.0
    for first in range(net.levels):
        work, seconds = size / lanes, 0.0  # work: the bytes that a server of this process takes into a stage
        for stage, name in enumerate(stages):
            n = net.sizes[(first + stage) % net.levels]
            seconds += 2 * _load(net, name, n) * work / rate + 2 * _steps(net, name, n) * latency
            work /= 1 if name == "ps" else n
        slowest = max(slowest, seconds)
    late = latency > 0 and isinstance(net, Torus) and set(stages) != {"ring"}  # near servers need not wait for far ones
    return Formula(slowest, exact=len(set(net.sizes)) == 1 and not late)


def _load(net: Topology, name: str, n: int) -> float:
    """Return how much of the bytes that a server takes into half a stage crosses the busiest link."""
    if name == "ps":
        return n - 1
    if name == "mesh" and isinstance(net, Torus):  # servers that are not neighbours are reached through others
        return n * n // 4 / n
    return (n - 1) / n


def _steps(net: Topology, name: str, n: int) -> int:
    """Return how many messages a server waits for, one after the other, in half a stage."""
    if name == "ring":
        return n - 1
    return n // 2 if isinstance(net, Torus) else 1  # the distance to the farthest server
