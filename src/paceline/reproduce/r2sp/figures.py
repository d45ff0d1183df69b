"""R²SP (Chen et al., INFOCOM 2019), and the cluster part of its journal version (ToN 2026).

Tables and figures have the numbers of the INFOCOM paper. From figure 7a and table II on, the numbers of the journal are
one higher; `also` holds them where they are not taken. Where the paper only plots a value, its column is empty.
"""

from __future__ import annotations

from paceline.reproduce.r2sp.contention import fig1, fig2, fig8, fig9, table1
from paceline.reproduce.r2sp.hardware import fig7a, fig11, fig12
from paceline.reproduce.r2sp.learning import fig7b, fig7c, fig10, optimizers
from paceline.reproduce.r2sp.nlp import fig14
from paceline.reproduce.r2sp.recipe import recipe
from paceline.reproduce.r2sp.theory import regime_map, staleness
from paceline.reproduce.r2sp.unequal import fig5, table2
from paceline.reproduce.shared.papers import Paper, PaperFigure
from paceline.reproduce.shared.rows import TITLES

PAPER = Paper(
    "r2sp",
    TITLES["r2sp"],
    (
        PaperFigure("table1", "Communication dominates an iteration under BSP", table1),
        PaperFigure("fig1", "The servers' links under BSP", fig1),
        PaperFigure("fig2", "An iteration without contention", fig2),
        PaperFigure("fig5", "Iteration time against batch size", fig5),
        PaperFigure("fig7a", "Hardware efficiency", fig7a, ("fig8a",)),
        PaperFigure("fig7b", "Statistical efficiency", fig7b, ("fig8b",)),
        PaperFigure("fig7c", "Overall efficiency", fig7c, ("fig8c",)),
        PaperFigure("fig8", "Gaps between updates", fig8),
        PaperFigure("fig9", "Bandwidth of a transfer", fig9),
        PaperFigure("table2", "Blocking without tuning, and tuned batches", table2, ("table3",)),
        PaperFigure("fig10", "Batch-size tuning: convergence", fig10),
        PaperFigure("fig11", "Speed-up against link bandwidth", fig11),
        PaperFigure("fig12", "The relaxation factor", fig12, ("fig13",)),
        PaperFigure("fig14", "Transformers with delayed workers", fig14),
        PaperFigure("staleness", "Staleness, measured and in theory", staleness),
        PaperFigure("optimizers", "Momentum and Adam, with staleness correction", optimizers),
        PaperFigure("recipe", "ResNet-20 to its final test accuracy", recipe),
        PaperFigure("map", "R²SP against pipelined BSP over the ratio of compute to communication", regime_map),
    ),
)
