"""HiPS (NetAI 2018): gradient synchronization time (GST) on BCube and Torus, by the paper's formula and simulated."""

from __future__ import annotations

from functools import cache

from paceline.collectives.algorithms import make
from paceline.collectives.flows import simulate
from paceline.collectives.formula import gst
from paceline.collectives.topology import BCube, Topology, Torus
from paceline.reproduce.shared.papers import Paper, PaperFigure
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import TITLES, Figure, Plot, PlotLine, Row, Where

SHAPES = ((4, 2), (8, 3), (16, 4))  # (n, h)
MAX_SIMULATED = 600  # servers; (16, 4) has 65,536
SCHEMES = {"HiPS": "hips", "PSS/MS": "mesh", "RS": "ring"}
FORMULA_ONLY = "By the paper's formula only: too large to simulate."
BOUND = "The paper gives a lower bound, which assumes that all links are used equally."
TABLE_1 = "Table 1 was not run: it needs two machines with RoCE NICs."


def network(kind: str, n: int, h: int) -> Topology:
    return BCube(n, h) if kind == "BCube" else Torus([n] * h)


def table3(request: Request) -> Figure:
    """Compare GST by the paper's formula with simulated GST, in units of W/B."""
    rows = []
    for kind in ("BCube", "Torus"):
        for n, h in SHAPES:
            for scheme, name in SCHEMES.items():
                paper, exact = _formula(kind, n, h, name)
                ours, where = _ours(kind, n, h, name, request.quick)
                note = BOUND if not exact else FORMULA_ONLY if where == "formula" else ""
                what = f"{kind} ({n}, {h}): {scheme}"
                rows.append(Row("table3", what, _short(paper), _short(ours), "W/B", where, note))
    return Figure("table3", "GST of HiPS, PSS/MS and RS", tuple(rows), missing=(TABLE_1,))


def fig6(request: Request) -> Figure:
    """Compare the GST of HiPS, PSS/MS and RS on BCube."""
    return _compared(request, "fig6", "BCube")


def fig7(request: Request) -> Figure:
    """Compare the GST of HiPS, PSS/MS and RS on Torus."""
    return _compared(request, "fig7", "Torus")


def _compared(request: Request, name: str, kind: str) -> Figure:
    rows = []
    bars: dict[str, list[float]] = {scheme: [] for scheme in SCHEMES}
    for n, h in SHAPES:
        paper = {scheme: _formula(kind, n, h, each)[0] for scheme, each in SCHEMES.items()}
        found = {scheme: _ours(kind, n, h, each, request.quick) for scheme, each in SCHEMES.items()}
        ours = {scheme: seconds for scheme, (seconds, _) in found.items()}
        for scheme, seconds in ours.items():
            bars[scheme].append(seconds)
        for scheme in ("PSS/MS", "RS"):
            saved = [100 * (1 - each["HiPS"] / each[scheme]) for each in (paper, ours)]
            what = f"{kind} ({n}, {h}): HiPS, time saved over {scheme}"
            where = found[scheme][1]
            note = FORMULA_ONLY if where == "formula" else ""
            rows.append(Row(name, what, round(saved[0], 1), round(saved[1], 1), "%", where, note))
    shapes = tuple(f"({n}, {h})" for n, h in SHAPES)
    plot = Plot(
        f"GST in {kind}", "(n, h)", "W/B", tuple(PlotLine(each, shapes, tuple(y)) for each, y in bars.items()), "bars"
    )
    return Figure(name, f"GST in {kind}", tuple(rows), (plot,))


@cache
def _formula(kind: str, n: int, h: int, name: str) -> tuple[float, bool]:
    found = gst(network(kind, n, h), name, 1.0, 1.0)
    assert found is not None
    return found.seconds, found.exact


@cache
def _simulated(kind: str, n: int, h: int, name: str, quick: bool) -> float | None:
    net = network(kind, n, h)
    if net.servers > (100 if quick else MAX_SIMULATED):
        return None
    elements = net.servers * net.ports * 60  # a multiple of every share's denominator
    return simulate(net, make(name, net, elements), rate=4.0 * elements)


def _ours(kind: str, n: int, h: int, name: str, quick: bool) -> tuple[float, Where]:
    """Return the simulated GST, or the formula's if the network is too large; and which of the two it is."""
    seconds = _simulated(kind, n, h, name, quick)
    return (_formula(kind, n, h, name)[0], "formula") if seconds is None else (seconds, "simulated")


def _short(value: float) -> float:
    return float(f"{value:.4g}")


PAPER = Paper(
    "hips",
    TITLES["hips"],
    (
        PaperFigure("table3", "GST of HiPS, PSS/MS and RS", table3),
        PaperFigure("fig6", "GST in BCube", fig6),
        PaperFigure("fig7", "GST in Torus", fig7),
    ),
)
