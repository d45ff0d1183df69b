"""ResNet20, trained: its part of figure 15 and of table IV. It is a figure of its own because it takes long."""

from __future__ import annotations

from paceline.reproduce.fl_r2sp.accuracy import accuracy_plots, accuracy_rows, filter_rows
from paceline.reproduce.fl_r2sp.convergence import convergence_rows
from paceline.reproduce.fl_r2sp.schemes import BSP_FILTERED, CORE, FL
from paceline.reproduce.fl_r2sp.trainings import paired, resnet20_case, trained
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import Figure

TITLE = "ResNet20, trained (fig. 15 and table IV)"


def resnet20(request: Request) -> Figure:
    """Compare the final accuracy of ResNet20 under each scheme, and the times to an accuracy that all reach."""
    case, note = resnet20_case(request)
    if case is None:
        return Figure("resnet20", TITLE, (), missing=(note,))
    found = trained(request, case, CORE)
    if not found:
        return Figure("resnet20", TITLE, (), missing=(note, "No training was done."))
    missing = [note]
    rows = accuracy_rows("resnet20", request, case, found) + filter_rows("resnet20", request, case, found)
    if paired(found, BSP_FILTERED, FL):
        rows += convergence_rows("resnet20", request, case, found)
    else:
        missing.append("ResNet20: not all trainings were done.")
    return Figure("resnet20", TITLE, tuple(rows), tuple(accuracy_plots(case, found)), tuple(missing))
