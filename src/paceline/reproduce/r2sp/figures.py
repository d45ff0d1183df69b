"""R²SP (Chen et al., INFOCOM 2019), and the cluster part of its journal version (ToN 2026), with other numbers."""

from __future__ import annotations

from paceline.reproduce.r2sp import learning, nlp, timing
from paceline.reproduce.shared.papers import Paper, PaperFigure
from paceline.reproduce.shared.rows import TITLES

PAPER = Paper(
    "r2sp",
    TITLES["r2sp"],
    (
        PaperFigure("table1", "Communication dominates an iteration under BSP", timing.table1),
        PaperFigure("fig1", "The servers' links under BSP", timing.fig1),
        PaperFigure("fig2", "An iteration without contention", timing.fig2),
        PaperFigure("fig5", "Iteration time against batch size", timing.fig5),
        PaperFigure("fig7a", "Hardware efficiency", timing.fig7a, ("fig8a",)),
        PaperFigure("fig7b", "Statistical efficiency", learning.fig7b, ("fig8b",)),
        PaperFigure("fig7c", "Overall efficiency", learning.fig7c, ("fig8c",)),
        PaperFigure("fig8", "Gaps between updates", timing.fig8),
        PaperFigure("fig9", "Bandwidth of a transfer", timing.fig9),
        PaperFigure("table2", "Blocking without tuning, and tuned batches", timing.table2, ("table3",)),
        PaperFigure("fig10", "Batch-size tuning: convergence", learning.fig10),
        PaperFigure("fig11", "Speed-up against link bandwidth", timing.fig11),
        PaperFigure("fig12", "The relaxation factor", timing.fig12, ("fig13",)),
        PaperFigure("fig14", "Transformers with workers held up", nlp.fig14),
        PaperFigure("staleness", "Staleness, measured and in theory", timing.staleness),
        PaperFigure("optimizers", "Momentum and Adam, with staleness corrected for", learning.optimizers),
        PaperFigure("map", "R²SP against pipelined BSP, over the ratio of computing to communication", timing.map),
    ),
)
