"""Pictures of networks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from paceline.collectives.topology import Cable, Topology, TopologyError, Torus

MAX_DRAWN = 300  # servers
COLOURS = ("#3b7dd8", "#e07b39", "#4aa564", "#8a5fbf", "#999999")


def draw(net: Topology, path: Path) -> None:
    """Draw the servers, switches and cables of a network to a PNG file. Each level has a colour for its cables."""
    from matplotlib.figure import Figure

    if net.servers > MAX_DRAWN:
        raise TopologyError(f"{net.name} has {net.servers:,} servers; at most {MAX_DRAWN} can be drawn.")
    places = _grid(net) if isinstance(net, Torus) else _tree(net)
    wide = max(x for x, _ in places.values()) - min(x for x, _ in places.values())
    high = max(y for _, y in places.values()) - min(y for _, y in places.values())
    figure = Figure(figsize=(min(16, 2 + 0.6 * wide), min(10, 2 + 0.9 * high)), layout="constrained")
    axes: Any = figure.subplots()
    for cable in net.cables:
        a, b = places[cable.node], places[cable.other]
        level = net.cable_level(cable)
        style = {
            "arrowstyle": "-",
            "color": COLOURS[min(level, 4)],
            "connectionstyle": f"arc3,rad={_bend(net, cable, a, b)}",
        }
        axes.annotate("", a, b, arrowprops=style)
    for node, (x, y) in places.items():
        server = node < net.servers
        label = "".join(map(str, net.address(node))) if max(net.sizes) <= 10 else ".".join(map(str, net.address(node)))
        box = {"boxstyle": "round" if server else "square", "fc": "white" if server else "#dddddd", "ec": "#555555"}
        axes.text(x, y, label if server else " ", ha="center", va="center", fontsize=8, bbox=box)
    axes.set_title(f"{net.name}: {net.servers} servers with {net.ports} NIC{'s' if net.ports > 1 else ''} each")
    axes.set_axis_off()
    axes.margins(0.15)
    axes.plot(*zip(*places.values(), strict=True), alpha=0)  # invisible; sets the limits of the axes
    if any(cable.other < net.servers for cable in net.cables) and not isinstance(net, Torus):
        axes.set_ylim(bottom=-2.0)  # room for cables that bend downwards
    figure.savefig(path, dpi=130, format="png")


def _bend(net: Topology, cable: Cable, a: tuple[float, float], b: tuple[float, float]) -> float:
    """Return how much a cable is bent, so that it does not run through other servers."""
    if isinstance(net, Torus):
        return 0.25 if math.dist(a, b) > 2.5 or (net.sizes[cable.port // 2] == 2 and cable.node > cable.other) else 0.0
    return -0.25 if cable.other < net.servers else 0.0


def _tree(net: Topology) -> dict[int, tuple[float, float]]:
    """Place the servers in a row, and the switches above them, level by level."""
    places: dict[int, tuple[float, float]] = {server: (float(server), 0.0) for server in range(net.servers)}
    left = list(net.cables)
    height = 0.0
    while left:
        height += 1.5
        below: dict[int, list[float]] = {}
        port = min(cable.port for cable in left if cable.node in places)
        for cable in left:
            if cable.node in places and cable.other not in places and (cable.port == port or cable.node >= net.servers):
                below.setdefault(cable.other, []).append(places[cable.node][0])
        taken: set[float] = set()
        for switch, xs in sorted(below.items()):
            x = sum(xs) / len(xs)
            while round(x, 2) in taken:
                x += 0.8
            taken.add(round(x, 2))
            places[switch] = (x, height)
        left = [cable for cable in left if cable.node not in places or cable.other not in places]
        if not below:
            break
    return places


def _grid(net: Topology) -> dict[int, tuple[float, float]]:
    """Place the first dimension to the right, the second upwards, and further ones diagonally."""
    places = {}
    for server in range(net.servers):
        digits = [net.digit(server, level) for level in range(net.levels)]
        aslant = sum((0.3 + 0.12 * level) * digit for level, digit in enumerate(digits[2:]))
        y = digits[1] if net.levels > 1 else 0
        places[server] = (2.0 * (digits[0] + aslant), 1.5 * (y + aslant))
    return places
