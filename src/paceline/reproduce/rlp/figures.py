"""RLP (ICLR 2020): where staleness matters, and what a learned policy makes of it."""

from __future__ import annotations

from paceline.reproduce.rlp.comparison import fig2, hundred_unseen
from paceline.reproduce.rlp.execution import fig4, table1
from paceline.reproduce.rlp.generalization import fig3
from paceline.reproduce.rlp.regimes import TITLE, regimes
from paceline.reproduce.shared.papers import Paper, PaperFigure
from paceline.reproduce.shared.rows import TITLES

PAPER = Paper(
    "rlp",
    TITLES["rlp"],
    (
        PaperFigure("map", TITLE, regimes),
        PaperFigure("unseen", "A hundred unseen instances", hundred_unseen),
        PaperFigure("fig2", "Performance comparison in the paper's regime", fig2),
        PaperFigure("fig3", "Generalization", fig3),
        PaperFigure("fig4", "The execution of each policy", fig4),
        PaperFigure("table1", "Iterations and idle time under each policy", table1),
    ),
)
