"""FL-R²SP (ToN 2026, section VI-B): what a federation gains when its groups take turns."""

from __future__ import annotations

from paceline.reproduce.fl_r2sp.accuracy import fig15
from paceline.reproduce.fl_r2sp.convergence import table4
from paceline.reproduce.fl_r2sp.resnet20 import TITLE as RESNET20
from paceline.reproduce.fl_r2sp.resnet20 import resnet20
from paceline.reproduce.fl_r2sp.round_times import fig16, fig18, fractions
from paceline.reproduce.fl_r2sp.transfers import fig17, table2, table5
from paceline.reproduce.shared.papers import Paper, PaperFigure
from paceline.reproduce.shared.rows import TITLES

PAPER = Paper(
    "fl-r2sp",
    TITLES["fl-r2sp"],
    (
        PaperFigure("table2", "The cost of contention on the server's link", table2),
        PaperFigure("fig15", "Accuracy, with outliers filtered and not", fig15),
        PaperFigure("table4", "Round time and time to converge", table4),
        PaperFigure("resnet20", RESNET20, resnet20),
        PaperFigure("fig16", "Phases of all clients", fig16),
        PaperFigure("table5", "Time to push and pull", table5),
        PaperFigure("fig17", "The server's uplink over time", fig17),
        PaperFigure("fig18", "Group size", fig18),
        PaperFigure("fractions", "The fraction C", fractions),
    ),
)
