"""Added by us: updates and time to the target over learning rate, momentum and stragglers, under fixed policies."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.reproduce.rlp.clusters import SEVERITIES, severe
from paceline.reproduce.rlp.evaluation import NAMES, NO_MNIST, evaluated, rlp_row, seeds_per_instance
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import Figure, Plot, PlotLine, Row
from paceline.rlp.evaluate import Times
from paceline.rlp.instance import Instance

RATES = (0.003, 0.01, 0.03, 0.1)
MOMENTA = (0.0, 0.5, 0.9)
POLICIES = ("bsp", "asp", "ssp:staleness=2", "dssp", "r2sp")
TITLE = "Where staleness matters"
NEVER = "The target was not reached at any learning rate."

Case = tuple[float, str, float]  # momentum, cluster, learning rate


def regimes(request: Request) -> Figure:
    """Map updates and time to the target over learning rate, stragglers and momentum."""
    if request.lacks("mnist"):
        return Figure("map", TITLE, (), missing=(NO_MNIST,))
    rates, momenta = (RATES[1:3], MOMENTA[::2]) if request.quick else (RATES, MOMENTA)
    severities = ("even", "table 1") if request.quick else SEVERITIES
    cases = [(m, kind, rate) for m in momenta for kind in severities for rate in rates]
    instances = [
        Instance(700_000 + at, *severe(kind), 1, rate=rate, momentum=m, budget=600 if request.quick else 1500)
        for at, (m, kind, rate) in enumerate(cases)
    ]
    times = evaluated(request, instances, seeds_per_instance(request), POLICIES)
    rows, plots = [], []
    for m in momenta:
        for kind in severities:
            at_rates = [cases.index((m, kind, rate)) for rate in rates]
            rows += [_best_rate_row(request, cases, times, spec, at_rates) for spec in POLICIES]
        for what, value in (("updates", _updates), ("time relative to the best policy", _slowdown)):
            lines = []
            for spec in POLICIES:
                for kind in severities:
                    y = tuple(value(times, spec, cases.index((m, kind, rate))) for rate in rates)
                    lines.append(PlotLine(f"{NAMES[spec]}, {kind}", tuple(f"{rate:g}" for rate in rates), y))
            plots.append(Plot(f"Momentum {m:g}: {what}", "learning rate", "", tuple(lines), "cells"))
    rows += _asp_against_bsp(request, cases, times)
    return Figure("map", TITLE, tuple(rows), tuple(plots))


def _best_rate_row(
    request: Request, cases: Sequence[Case], times: dict[str, Times], spec: str, at_rates: Sequence[int]
) -> Row:
    """Return a policy's time at its own best learning rate, of the cases that differ in the rate alone."""
    momentum, kind, _ = cases[at_rates[0]]
    what = f"momentum {momentum:g}, {kind}: {NAMES[spec]}, time at its own best rate"
    reached = [case for case in at_rates if times[spec].reached[case].all()]
    best = min(reached, key=lambda case: float(times[spec].mean[case]), default=None)
    if best is None:
        return rlp_row("map", what, None, None, "steps", request, NEVER)
    note = f"Rate {cases[best][2]:g}; {times[spec].updates[best].mean():.0f} updates."
    return rlp_row("map", what, None, float(times[spec].mean[best]), "steps", request, note)


def _updates(times: dict[str, Times], spec: str, case: int) -> float | None:
    """Return the mean updates to the target; None if most seeds missed it."""
    return float(times[spec].updates[case].mean()) if _mostly_reached(times[spec], case) else None


def _slowdown(times: dict[str, Times], spec: str, case: int) -> float | None:
    """Return the time relative to the best policy's; None if most seeds missed the target."""
    if not _mostly_reached(times[spec], case):
        return None
    best = min(float(each.mean[case]) for each in times.values() if _mostly_reached(each, case))
    return float(times[spec].mean[case]) / best


def _mostly_reached(times: Times, case: int) -> bool:
    return bool(times.reached[case].mean() > 0.5)


def _asp_against_bsp(request: Request, cases: Sequence[Case], times: dict[str, Times]) -> list[Row]:
    """Look for what table 1 shows: cases where ASP needs twice BSP's updates, and cases where BSP takes less time."""
    both = [case for case in range(len(cases)) if all(_mostly_reached(times[spec], case) for spec in ("bsp", "asp"))]
    if not both:
        return []
    ratio = {case: float(times["asp"].updates[case].mean() / times["bsp"].updates[case].mean()) for case in both}
    most = max(ratio, key=lambda case: ratio[case])
    note = f"Momentum {cases[most][0]:g}, {cases[most][1]}, rate {cases[most][2]:g}."
    rows = [rlp_row("map", "ASP's updates relative to BSP's, maximum", 569 / 279, ratio[most], "×", request, note)]
    if on_table_1 := [case for case in both if cases[case][1] == "table 1"]:
        most = max(on_table_1, key=lambda case: ratio[case])
        what = "ASP's updates relative to BSP's on table 1's workers, maximum"
        note = f"Momentum {cases[most][0]:g}, rate {cases[most][2]:g}."
        rows.append(rlp_row("map", what, 569 / 279, ratio[most], "×", request, note))
    sooner = sum(float(times["bsp"].mean[case]) < float(times["asp"].mean[case]) for case in both)
    note = f"Of {len(both)} cases where both reach the target. In {len(cases) - len(both)} others one or both miss it."
    rows.append(rlp_row("map", "cases where BSP is faster than ASP", None, float(sooner), "", request, note))
    return rows
