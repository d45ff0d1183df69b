"""A collective as one line of text, like a policy: "bcube:n=2,levels=2,rates=600Gbit/100Gbit"."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.collectives.algorithms import AlgorithmError, algorithm_named, stages_of
from paceline.collectives.topology import Topology, TopologyError, topology
from paceline.simulate import units

OPTIONS = ("n", "levels", "sizes", "rates", "stages", "algorithm", "nics")


@dataclass(frozen=True)
class NamedCollective:
    """A network and the all-reduce algorithm that runs on it."""

    net: Topology
    algorithm: str = "hips"
    stages: tuple[str, ...] = ("ring",)
    nics: tuple[str, ...] = ()  # of this machine, by port

    def fits(self, ranks: int) -> None:
        """Raise TopologyError unless the network has as many servers as there are ranks."""
        if self.net.servers != ranks:
            raise TopologyError(
                f"{self.net.name} has {self.net.servers} servers, but there are {ranks} ranks; "
                "the two numbers must be equal."
            )


def named(text: str) -> NamedCollective:
    """Read such a line. Raise TopologyError or AlgorithmError, with one sentence, if it is wrong."""
    kind, _, rest = text.partition(":")
    options: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, given, value = part.partition("=")
        if not given or key not in OPTIONS:
            raise TopologyError(f"{part!r} is not an option of a topology; the options are {', '.join(OPTIONS)}.")
        options[key] = value
    try:
        n, levels = int(options.get("n", "0")), int(options.get("levels", "2"))
        sizes = [int(each) for each in options["sizes"].split("x")] if "sizes" in options else []
    except ValueError:
        raise TopologyError(f"n and levels must be whole numbers, and sizes such as 3x4; got {text!r}.") from None
    try:
        rates = units.rates(options["rates"]) if "rates" in options else []
    except ValueError:
        raise TopologyError(f"rates must be one for each level, such as 600Gbit/100Gbit; got {text!r}.") from None
    net = topology(kind, n, levels, sizes, rates)
    algorithm = algorithm_named(options.get("algorithm", "hips"), net)
    stages = stages_of(net, options.get("stages", "ring").split("/"))
    nics = tuple(filter(None, options.get("nics", "").split("/")))
    if nics and len(nics) != net.ports:
        raise AlgorithmError(f"{net.name} has {net.ports} NICs in each server; got {len(nics)}.")
    return NamedCollective(net, algorithm, stages, nics)
