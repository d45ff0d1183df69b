"""HiPS (NetAI 2018): gradient synchronization time (GST) on BCube and Torus, by the paper's formula and simulated."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from paceline.collectives.algorithms import make
from paceline.collectives.flows import simulate
from paceline.collectives.formula import gst
from paceline.collectives.ring_orders import disjoint_rings
from paceline.collectives.topology import BCube, Topology, Torus
from paceline.reproduce.shared.papers import Paper, PaperFigure
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import TITLES, Figure, Plot, PlotLine, Row, Where

SHAPES = ((4, 2), (8, 3), (16, 4))  # (n, h)
KINDS = ("BCube", "Torus")
MAX_SIMULATED = 600  # servers; (16, 4) has 65,536
MAX_QUICK = 100  # servers
RINGS = "edge-disjoint rings"
SCHEMES = {"HiPS": "hips", "PSS/MS": "mesh", "RS": "ring", RINGS: "rings"}
#: Table 3, as printed: GST in units of W/B. For PSS/MS on Torus it is a lower bound.
TABLE_3: dict[tuple[str, str], Callable[[int, int], float]] = {
    ("BCube", "HiPS"): lambda n, h: 2 * (n**h - 1) / n**h / h,
    ("BCube", "PSS/MS"): lambda n, h: 2 * (n - 1) / n,
    ("BCube", "RS"): lambda n, h: 2 * (n**h - 1) / n**h,
    ("Torus", "HiPS"): lambda n, h: (n**h - 1) / n**h / h,
    ("Torus", "PSS/MS"): lambda n, h: (n - 1) / n,
    ("Torus", "RS"): lambda n, h: (n**h - 1) / n**h,
}
PRINTED = {"PSS/MS": (37.5, 73.3), "RS": (50.0, 75.0)}  # section 4.2: the least and the most time saved, in %
HEADING = "paper's formula"
FORMULA_ONLY = "Ours is calculated too, not simulated."
BOUND = "The paper gives a lower bound, which assumes that all links are used equally."
NOT_IN_PAPER = "Not in the paper, which says that a second ring does not fit (sections 4.1 and 4.2)."
TABLE_1 = "Table 1 was not run: it needs two machines with RoCE NICs."


@cache
def network(kind: str, n: int, h: int) -> Topology:
    return BCube(n, h) if kind == "BCube" else Torus([n] * h)


def table3(request: Request) -> Figure:
    """Compare GST by the paper's formula with simulated GST, in units of W/B."""
    rows, missing = [], [TABLE_1]
    for kind in KINDS:
        for n, h in SHAPES:
            for scheme in _schemes(kind, n, h):
                paper, (ours, where) = _paper(kind, n, h, scheme), _ours(kind, n, h, scheme, request.quick)
                notes = [
                    NOT_IN_PAPER if paper is None else "",
                    BOUND if (kind, scheme) == ("Torus", "PSS/MS") else "",
                    FORMULA_ONLY if where == "formula" else "",
                ]
                what, shown = f"{kind} ({n}, {h}): {scheme}", None if paper is None else _short(paper)
                rows.append(Row("table3", what, shown, _short(ours), "W/B", where, " ".join(filter(None, notes))))
            if RINGS not in _schemes(kind, n, h):
                missing.append(f"No edge-disjoint rings are known for {kind} ({n}, {h}).")
    return Figure("table3", "GST of HiPS, PSS/MS and RS", tuple(rows), (), tuple(missing), HEADING)


def section4(request: Request) -> Figure:
    """Compare the time that HiPS saves on all shapes with the range that the text of section 4.2 gives."""
    rows = []
    for scheme, printed in PRINTED.items():
        ours = [_saved(kind, n, h, scheme, request.quick) for kind in KINDS for n, h in SHAPES]
        calculated = [_paper_saved(kind, n, h, scheme) for kind in KINDS for n, h in SHAPES]
        for word, pick, paper in zip(("least", "most"), (min, max), printed, strict=True):
            note = f"The paper's formulas give {pick(calculated):.1f}. (16, 4) is calculated, not simulated."
            what = f"HiPS, {word} time saved over {scheme} on all networks"
            rows.append(Row("section4", what, paper, round(pick(ours), 1), "%", "simulated", note))
    return Figure("section4", "Time saved by HiPS, as the text gives it", tuple(rows))


def fig6(request: Request) -> Figure:
    """Compare the GST of HiPS, PSS/MS and RS on BCube."""
    return _compared(request, "fig6", "BCube")


def fig7(request: Request) -> Figure:
    """Compare the GST of HiPS, PSS/MS and RS on Torus."""
    return _compared(request, "fig7", "Torus")


def _compared(request: Request, name: str, kind: str) -> Figure:
    rows = []
    bars: dict[str, list[float | None]] = {scheme: [] for scheme in SCHEMES}
    for n, h in SHAPES:
        schemes = _schemes(kind, n, h)
        for scheme, found in bars.items():
            found.append(_ours(kind, n, h, scheme, request.quick)[0] if scheme in schemes else None)
        for scheme in schemes[1:]:
            paper = None if scheme == RINGS else round(_paper_saved(kind, n, h, scheme), 1)
            what = f"{kind} ({n}, {h}): HiPS, time saved over {scheme}"
            where = _ours(kind, n, h, scheme, request.quick)[1]
            note = " ".join([NOT_IN_PAPER] * (paper is None) + [FORMULA_ONLY] * (where == "formula"))
            ours = round(_saved(kind, n, h, scheme, request.quick), 1) + 0.0  # not −0
            rows.append(Row(name, what, paper, ours, "%", where, note))
    shapes = tuple(f"({n}, {h})" for n, h in SHAPES)
    plot = Plot(
        f"GST in {kind}", "(n, h)", "W/B", tuple(PlotLine(each, shapes, tuple(y)) for each, y in bars.items()), "bars"
    )
    return Figure(name, f"GST in {kind}", tuple(rows), (plot,), (), HEADING)


@cache
def _schemes(kind: str, n: int, h: int) -> list[str]:
    """Return the schemes that a network has."""
    return [scheme for scheme in SCHEMES if scheme != RINGS or disjoint_rings(network(kind, n, h))]


def _paper(kind: str, n: int, h: int, scheme: str) -> float | None:
    """Return the GST by the formula of table 3, or None if the paper does not have the scheme."""
    formula = TABLE_3.get((kind, scheme))
    return formula(n, h) if formula else None


def _paper_saved(kind: str, n: int, h: int, scheme: str) -> float:
    return 100 * (1 - TABLE_3[kind, "HiPS"](n, h) / TABLE_3[kind, scheme](n, h))


def _saved(kind: str, n: int, h: int, scheme: str, quick: bool) -> float:
    return 100 * (1 - _ours(kind, n, h, "HiPS", quick)[0] / _ours(kind, n, h, scheme, quick)[0])


@cache
def _ours(kind: str, n: int, h: int, scheme: str, quick: bool) -> tuple[float, Where]:
    """Return the simulated GST, or that of our formula if the network is too large; and which of the two it is."""
    net, name = network(kind, n, h), SCHEMES[scheme]
    if net.servers <= (MAX_QUICK if quick else MAX_SIMULATED):
        elements = net.servers * net.ports * 60  # a multiple of every share's denominator
        return simulate(net, make(name, net, elements), rate=4.0 * elements), "simulated"
    found = gst(net, name, 1.0, 1.0)
    assert found is not None
    return found.seconds, "formula"


def _short(value: float) -> float:
    return float(f"{value:.4g}")


PAPER = Paper(
    "hips",
    TITLES["hips"],
    (
        PaperFigure("table3", "GST of HiPS, PSS/MS and RS", table3),
        PaperFigure("section4", "Time saved by HiPS, as the text gives it", section4),
        PaperFigure("fig6", "GST in BCube", fig6),
        PaperFigure("fig7", "GST in Torus", fig7),
    ),
)
