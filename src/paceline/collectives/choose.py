"""The choice of an algorithm for each stage: few steps for small messages, few bytes for large ones."""

from __future__ import annotations

from itertools import product

from paceline.collectives.algorithms import STAGES, AlgorithmError, hips
from paceline.collectives.flows import simulate
from paceline.collectives.formula import gst
from paceline.collectives.topology import Topology

CLOSE_TO_BEST = 1.5  # choices whose estimate is within this factor of the best are simulated
MAX_SIMULATED = 600  # servers


def best_stages(net: Topology, size: float, rate: float, latency: float = 0.0) -> tuple[str, ...]:
    """Return the fastest choice of stages for messages of `size` bytes.

    The formula decides where it is exact or the network is too large to be simulated. Elsewhere the simulation decides.
    Of equally fast choices, the one with fewer steps is returned.
    """
    small = net.servers <= MAX_SIMULATED
    choices = list(product(STAGES, repeat=net.levels))
    known = {stages: found for stages in choices if (found := gst(net, "hips", size, rate, latency, stages))}
    if known:
        least = min(found.seconds for found in known.values())
        choices = [stages for stages in choices if known[stages].seconds <= CLOSE_TO_BEST * least]
    elif not small:
        raise AlgorithmError(f"{net.name} is too large to choose stages by simulation; name the stages.")
    elements = max(1, round(size / 4))

    def cost(stages: tuple[str, ...]) -> tuple[float, int]:
        if stages in known and (known[stages].exact or not small):
            seconds = known[stages].seconds
        else:
            seconds = simulate(net, hips(net, elements, stages), rate, latency)
        return float(f"{seconds:.6g}"), stages.count("ring")

    return min(choices, key=cost)
