"""Final accuracy with and without the filter for outliers, and which clients the filter blacklists (fig. 15)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import mean

import msgspec

from paceline.reproduce.fl_r2sp.schemes import BSP, BSP_FILTERED, FL, FL_PLAIN
from paceline.reproduce.fl_r2sp.trainings import BySeed, FederatedCase, cases, paired, trained
from paceline.reproduce.shared.federation import Federated
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import Figure, Plot, PlotLine, Row


def fig15(request: Request) -> Figure:
    """Compare the final accuracy of each scheme, and count the clients that the filter blacklists."""
    rows: list[Row] = []
    plots: list[Plot] = []
    chosen, missing = cases(request)
    for case in chosen:
        found = trained(request, case, case.schemes.values())
        if left_out := [scheme for scheme, policy in case.schemes.items() if policy not in found]:
            missing.append(f"{case.title}: not trained: {'; '.join(left_out)}.")
        if found:
            rows += accuracy_rows("fig15", request, case, found)
            rows += filter_rows("fig15", request, case, found)
            plots += accuracy_plots(case, found)
    return Figure("fig15", "Accuracy, with outliers filtered and not", tuple(rows), tuple(plots), tuple(missing))


def accuracy_rows(id: str, request: Request, case: FederatedCase, found: dict[str, BySeed]) -> list[Row]:
    """Return the final accuracy of each scheme, and the difference between FL-R²SP and BSP if both are filtered."""
    rows = []
    for scheme, policy in case.schemes.items():
        if runs := found.get(policy):
            what, note = f"{case.title}: {scheme}, final accuracy", f"{_seeds(runs)}; the paper only plots this"
            rows.append(Row(id, what, None, round(_final(runs), 2), "%", request.where, note))
    if pair := paired(found, BSP_FILTERED, FL):
        what = f"{case.title}: FL-R²SP's final accuracy above that of filtered BSP"
        rows.append(Row(id, what, "comparable", _gained(*pair), "points", request.where))
    return rows


def filter_rows(id: str, request: Request, case: FederatedCase, found: dict[str, BySeed]) -> list[Row]:
    """Return the accuracy that the filter gains, and the shares of outliers and of other clients that it blacklists."""
    rows = []
    for scheme, plain, filtered in (("BSP", BSP, BSP_FILTERED), ("FL-R²SP", FL_PLAIN, FL)):
        if pair := paired(found, plain, filtered):
            what = f"{case.title}: {scheme}, accuracy gained by the filter"
            rows.append(Row(id, what, "around 10", _gained(*pair), "points", request.where, _seeds(pair[0])))
        if runs := found.get(filtered):
            detected = 100 * mean(run.detected for run in runs.values())
            wrongly = 100 * mean(run.wrongly_blacklisted for run in runs.values())
            for who, share in (("outliers", detected), ("other clients", wrongly)):
                what = f"{case.title}: {scheme}, {who} that the filter blacklists"
                rows.append(Row(id, what, None, round(share, 1), "%", request.where))
    if not case.core:
        without_outliers = msgspec.structs.replace(case.template, outliers=0.0)
        if clean := trained(request, FederatedCase(case.name, without_outliers), (FL,)).get(FL):
            wrongly = 100 * mean(run.wrongly_blacklisted for run in clean.values())
            what = f"{case.title}: FL-R²SP, clients blacklisted when there are no outliers"
            rows.append(Row(id, what, None, round(wrongly, 2), "%", request.where, _seeds(clean)))
    return rows


def accuracy_plots(case: FederatedCase, found: dict[str, BySeed]) -> list[Plot]:
    """Return the final accuracies as bars, and the accuracy over time."""
    done = {scheme: found[policy] for scheme, policy in case.schemes.items() if policy in found}
    bars = PlotLine("", tuple(done), tuple(_final(runs) for runs in done.values()))
    curves = tuple(_curve(scheme, next(iter(runs.values()))) for scheme, runs in done.items())
    return [
        Plot(f"{case.title}: final accuracy", "", "%", (bars,), "bars"),
        Plot(f"{case.title}: accuracy over time", "seconds", "test accuracy", curves),
    ]


def _final(runs: BySeed) -> float:
    """Return the final accuracy in per cent, as the mean over the seeds."""
    return 100 * mean(run.final for run in runs.values())


def _gained(before: Sequence[Federated], after: Sequence[Federated]) -> float:
    """Return the difference in final accuracy, in percentage points."""
    return round(100 * (mean(run.final for run in after) - mean(run.final for run in before)), 2)


def _seeds(runs: Collection[object]) -> str:
    return f"seeds: {len(runs)}"


def _curve(name: str, run: Federated) -> PlotLine:
    return PlotLine(name, tuple(time for time, _ in run.tests), tuple(accuracy for _, accuracy in run.tests))
