"""Round time, and time to converge (table IV)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mean

from paceline.reproduce.fl_r2sp.schemes import BSP, BSP_FILTERED, CORE, FL, FL_PLAIN, MODELS, rounds
from paceline.reproduce.fl_r2sp.trainings import BySeed, FederatedCase, cases, paired, trained
from paceline.reproduce.shared.federation import Federated
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import Figure, Row
from paceline.reproduce.shared.simulated import report, row
from paceline.simulate import load_cluster

#: BSP's seconds per round and until convergence, FL-R²SP's, and by how many per cent the latter converges sooner.
TABLE_4 = {
    "CNN": ((10.69, 4098.81), (8.31, 3181.55), 22.4),
    "LSTM": ((9.41, 2695.38), (8.17, 2319.89), 13.9),
    "ResNet20": ((44.90, 9172.85), (36.75, 8158.34), 11.1),
}


def table4(request: Request) -> Figure:
    """Compare round times, and the times to an accuracy that both BSP and FL-R²SP reach."""
    rows = _round_rows(request)
    chosen, missing = cases(request)
    for case in chosen:
        found = trained(request, case, CORE)
        if paired(found, BSP_FILTERED, FL):
            rows += convergence_rows("table4", request, case, found)
        else:
            missing.append(f"{case.title}: not all trainings were done.")
    return Figure("table4", "Round time and time to converge", tuple(rows), missing=tuple(missing))


def _round_rows(request: Request) -> list[Row]:
    make_row = partial(row, "table4")
    rows: list[Row] = []
    for model, (bsp, fl, _) in TABLE_4.items():
        spec = load_cluster(f"fl-{MODELS[model]}")
        ours = [report(spec, policy, rounds(request.quick)).mean_iteration_seconds for policy in (BSP, FL)]
        note = "The compute time was fitted to BSP's round time, together with table V." if not rows else ""
        papers_saved, ours_saved = round(100 * (1 - fl[0] / bsp[0]), 1), 100 * (1 - ours[1] / ours[0])
        rows += [
            make_row(f"{model}, BSP: round time", bsp[0], ours[0], "s", note),
            make_row(f"{model}, FL-R²SP: round time", fl[0], ours[1], "s"),
            make_row(f"{model}: round time saved over BSP", papers_saved, ours_saved, "%"),
        ]
    return rows


def convergence_rows(id: str, request: Request, case: FederatedCase, found: dict[str, BySeed]) -> list[Row]:
    """Return the times to an accuracy that every run reaches.

    The filter makes both schemes faster, so the time saved is given three times: with both filtered, with FL-R²SP alone
    filtered, and with neither.
    """
    rows: list[Row] = []
    # One point below the lower of the two final accuracies, so that every run reaches the target and stays there.
    target = min(run.final for runs in paired(found, BSP_FILTERED, FL) for run in runs) - 0.01
    papers = TABLE_4[case.name]
    pairs = (
        ("filtered BSP", BSP_FILTERED, FL),
        ("BSP, FL-R²SP alone filtered", BSP, FL),
        ("BSP, neither filtered", BSP, FL_PLAIN),
    )
    for other, bsp_policy, fl_policy in pairs:
        pair = paired(found, bsp_policy, fl_policy)
        times = [_mean_time(runs, target) for runs in pair]
        if bsp_policy == BSP_FILTERED:
            for scheme, paper, seconds in zip(("BSP, filtered", "FL-R²SP"), papers[:2], times, strict=True):
                what = f"{case.title}, {scheme}: time to {100 * target:.1f}%"
                rows.append(Row(id, what, paper[1], seconds and round(seconds, 1), "s", request.where))
        if len(times) == 2 and times[0] and times[1]:
            saved = round(100 * (1 - times[1] / times[0]), 1)
            what = f"{case.title}: FL-R²SP's time to {100 * target:.1f}%, saved over {other}"
            rows.append(Row(id, what, papers[2], saved, "%", request.where, f"seeds: {len(pair[0])}"))
    return rows


def _mean_time(runs: Sequence[Federated], target: float) -> float | None:
    """Return the mean time to the target accuracy; None if any run missed it."""
    times = [run.time_to(target) for run in runs]
    reached = [time for time in times if time is not None]
    return mean(reached) if len(reached) == len(times) else None
