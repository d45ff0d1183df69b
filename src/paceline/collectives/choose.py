"""The choice of an algorithm: few steps for small messages, few bytes for large ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from paceline.collectives.algorithms import STAGES, AlgorithmError, make
from paceline.collectives.flows import busiest_link, simulate
from paceline.collectives.formula import gst
from paceline.collectives.ring_orders import disjoint_rings
from paceline.collectives.schedule import Schedule
from paceline.collectives.topology import Topology

CLOSE_TO_BEST = 3.0  # on larger networks, only choices whose estimate is within this factor of the best are simulated
MAX_ALL_SIMULATED = 64  # servers; up to this size, every choice that can be the fastest is timed
MAX_SIMULATED = 600  # servers


@dataclass(frozen=True)
class Choice:
    """An algorithm, the stages if it is HiPS, and its time."""

    algorithm: str
    stages: tuple[str, ...] = ()
    seconds: float = 0.0


def candidates(net: Topology) -> list[Choice]:
    """Return everything among which `fastest` chooses: HiPS with any stages, and the flat algorithms."""
    flat = ["ring", "mesh", "ps", *(["rings"] if disjoint_rings(net) else [])]
    return [*_hips_choices(net), *map(Choice, flat)]


def fastest(net: Topology, size: float, rate: float, latency: float = 0.0) -> Choice:
    """Return the fastest of all candidates for messages of `size` bytes.

    Formulas decide where they are exact, or where the network is too large to be simulated. Elsewhere the simulation
    decides. Of equally fast choices, the one with the fewest steps is returned.
    """
    return _fastest(net, candidates(net), size, rate, latency)


def best_stages(net: Topology, size: float, rate: float, latency: float = 0.0) -> tuple[str, ...]:
    """Return the fastest choice of stages for HiPS, in the same way."""
    return _fastest(net, _hips_choices(net), size, rate, latency).stages


def _hips_choices(net: Topology) -> list[Choice]:
    return [Choice("hips", stages) for stages in product(STAGES, repeat=net.levels)]


def _fastest(net: Topology, choices: Iterable[Choice], size: float, rate: float, latency: float) -> Choice:
    small = net.servers <= MAX_SIMULATED
    known = {each: gst(net, each.algorithm, size, rate, latency, each.stages or ("ring",)) for each in choices}
    if not small and not all(known.values()):
        raise AlgorithmError(f"{net.name} is too large to choose an algorithm by simulation; name the stages.")
    timed = [
        replace(each, seconds=found.seconds) for each, found in known.items() if found and (found.exact or not small)
    ]
    calculated = {replace(each, seconds=0.0) for each in timed}
    estimate = min((found.seconds for found in known.values() if found), default=0.0)
    limits = {each: _at_least(net, each, size, rate) for each in known if each not in calculated}
    for each in sorted(limits, key=lambda each: limits[each]):
        found = known[each]
        far = found and net.servers > MAX_ALL_SIMULATED and found.seconds > CLOSE_TO_BEST * estimate
        if not far and limits[each] <= min((other.seconds for other in timed), default=limits[each]):
            timed.append(replace(each, seconds=_simulated(net, each, size, rate, latency)))
    order = list(known)
    return min(
        timed,
        key=lambda each: (
            float(f"{each.seconds:.6g}"),
            _steps(net, each),
            each.stages.count("ring"),
            order.index(replace(each, seconds=0.0)),
        ),
    )


def _at_least(net: Topology, choice: Choice, size: float, rate: float) -> float:
    """Return seconds that a choice cannot be faster than. Without latency, a formula that is not exact is a bound."""
    found = gst(net, choice.algorithm, size, rate, 0.0, choice.stages or ("ring",))
    if found:
        return 0.999 * found.seconds  # shares of a few elements are not equal
    return 0.999 * busiest_link(net, _schedule(net, choice, size), rate)


@lru_cache(maxsize=1024)
def _simulated(net: Topology, choice: Choice, size: float, rate: float, latency: float) -> float:
    return simulate(net, _schedule(net, choice, size), rate, latency)


def _schedule(net: Topology, choice: Choice, size: float) -> Schedule:
    return make(choice.algorithm, net, max(1, round(size / 4)), choice.stages or ("ring",))


def _steps(net: Topology, choice: Choice) -> int:
    """Return the number of steps of a choice."""
    if choice.algorithm == "hips":
        return sum(2 * (n - 1 if name == "ring" else 1) for n, name in zip(net.sizes, choice.stages, strict=True))
    return 2 if choice.algorithm in ("mesh", "ps") else 2 * (net.servers - 1)
