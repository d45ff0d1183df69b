"""R²SP (Chen et al., INFOCOM 2019), and the cluster part of its journal version (ToN 2026).

The two papers count differently: from figure 7a and table II on, the journal's numbers are one higher. A plain id, such
as fig8, is the INFOCOM paper's number, and fig14 is the journal's alone. `ton-fig9` names the same figure by the
journal's number, and `infocom-fig8` by the INFOCOM paper's. A number that only the journal uses, such as fig13, is a
name too. Where the paper only plots a value, its column is empty.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.reproduce.r2sp.contention import fig1, fig2, fig8, fig9, table1
from paceline.reproduce.r2sp.hardware import fig7a, fig11, fig12
from paceline.reproduce.r2sp.learning import fig7b, fig7c, fig10, optimizers
from paceline.reproduce.r2sp.nlp import fig14
from paceline.reproduce.r2sp.recipe import recipe
from paceline.reproduce.r2sp.theory import regime_map, staleness
from paceline.reproduce.r2sp.unequal import fig5, table2
from paceline.reproduce.shared.papers import Paper, PaperFigure
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import TITLES, Figure


def _in_both(infocom: str, ton: str, title: str, make: Callable[[Request], Figure], *also: str) -> PaperFigure:
    """Return a figure of both papers, with its number in each."""
    return PaperFigure(
        infocom, title, make, (f"infocom-{infocom}", f"ton-{ton}", *also), f"INFOCOM {infocom}, ToN {ton}"
    )


PAPER = Paper(
    "r2sp",
    TITLES["r2sp"],
    (
        _in_both("table1", "table1", "Communication dominates an iteration under BSP", table1),
        _in_both("fig1", "fig1", "The servers' links under BSP", fig1),
        _in_both("fig2", "fig2", "An iteration without contention", fig2),
        _in_both("fig5", "fig5", "Iteration time against batch size", fig5),
        _in_both("fig7a", "fig8a", "Hardware efficiency", fig7a, "fig8a"),
        _in_both("fig7b", "fig8b", "Statistical efficiency", fig7b, "fig8b"),
        _in_both("fig7c", "fig8c", "Overall efficiency", fig7c, "fig8c"),
        _in_both("fig8", "fig9", "Gaps between updates", fig8),
        _in_both("fig9", "fig10", "Bandwidth of a transfer", fig9),
        _in_both("table2", "table3", "Blocking without tuning, and tuned batches", table2, "table3"),
        _in_both("fig10", "fig11", "Batch-size tuning: convergence", fig10),
        _in_both("fig11", "fig12", "Speed-up against link bandwidth", fig11),
        _in_both("fig12", "fig13", "The relaxation factor", fig12, "fig13"),
        PaperFigure("fig14", "Transformers with delayed workers", fig14, ("ton-fig14",), "ToN fig14"),
        PaperFigure("staleness", "Staleness, measured and in theory", staleness),
        PaperFigure("optimizers", "Momentum and Adam, with staleness correction", optimizers),
        PaperFigure("recipe", "ResNet-20 to its final test accuracy", recipe),
        PaperFigure("map", "R²SP against pipelined BSP over the ratio of compute to communication", regime_map),
    ),
)
