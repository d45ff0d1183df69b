"""Table 3 of the HiPS paper: GST, the time of one synchronization, in closed form.

The paper counts bytes alone, and has levels of equal size and rate. Here each step also costs the latency, if one is
given, and the levels may differ. `least` is the time that no algorithm can go below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.collectives.algorithms import ALIASES, AlgorithmError, algorithm_named, stages_of
from paceline.collectives.shares import hips_seconds
from paceline.collectives.topology import BCube, DCell, FatTree, Topology, Torus


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
    """Return the GST of `size` bytes (W) over NICs of this rate (B), or of the network's own rates.

    Return None where there is no formula: table 3 covers BCube and Torus. The formula of the ring covers all networks,
    because `ring_order` finds a ring without detours in each of them.
    """
    algorithm = ALIASES.get(algorithm, algorithm)
    count = net.servers  # N
    both = len(net.directions)
    rates = net.level_rates(rate)
    if algorithm == "ring" and isinstance(net, BCube | DCell | FatTree | Torus):
        seconds = 2 * (count - 1) / count * size / (both * min(rates))  # a ring uses links of every level
        return Formula(seconds + 2 * (count - 1) * latency)
    if not isinstance(net, BCube | Torus):
        return None
    if algorithm == "hips":
        return _hips(net, size, rate, latency, stages_of(net, stages))
    if algorithm == "rings":
        algorithm_named(algorithm, net)  # raises AlgorithmError if there are none
        seconds = 2 * (count - 1) / count * size / (both * net.levels * min(rates))
        return Formula(seconds + 2 * (count - 1) * latency)
    if algorithm == "mesh":  # on a torus a lower bound: at best it is a BCube with links twice as fast
        slowest = max(2 * (n - 1) / n * size / (both * each) for n, each in zip(net.sizes, rates, strict=True))
        exact = isinstance(net, BCube) and not latency and not net.rates
        return Formula(slowest + 2 * net.levels * latency, exact)
    if algorithm == "ps":  # all NICs of the one server, if they were used evenly
        return Formula(2 * (count - 1) * size / _server_rate(net, rate) + 2 * latency, exact=False)
    raise AlgorithmError(f"There is no formula for {algorithm!r}.")


def least(net: Topology, size: float, rate: float) -> float:
    """Return the seconds below which no all-reduce can be.

    All servers together must send (N − 1)·W bytes to form the sums, and as many to return them. The same holds for the
    parts into which a BCube or a torus falls without the links of a level: they have these links alone in common.
    """
    parts = [(net.servers, _server_rate(net, rate))]
    if isinstance(net, BCube | Torus):
        for n, each in zip(net.sizes, net.level_rates(rate), strict=True):
            parts.append((n, net.servers / n * each * len(net.directions)))
    return max(2 * (count - 1) / count * size / total for count, total in parts)


def _server_rate(net: Topology, rate: float) -> float:
    """Return the rate of all NICs of a server together."""
    if net.ports < net.levels:  # a server has NICs of level 0 alone
        return net.ports * net.level_rates(rate)[0]
    return sum(net.level_rates(rate)) * net.ports / net.levels


def _hips(net: Topology, size: float, rate: float, latency: float, stages: tuple[str, ...]) -> Formula:
    """Return the time until all processes have ended. Each process begins at a different level."""
    alike = len(set(net.sizes)) == 1 and not net.rates
    late = isinstance(net, Torus) and set(stages) != {"ring"}  # near servers need not wait for far ones
    return Formula(hips_seconds(net, stages, size, rate, latency), exact=not latency or (alike and not late))
