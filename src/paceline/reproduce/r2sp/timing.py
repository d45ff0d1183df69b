"""Those of the R²SP paper's results that are about time alone, so that the simulator can show them without training.

Figures and tables have the numbers of the INFOCOM paper; in the journal they are one higher from figure 7a and table II
on. Where the paper gives a figure only as a picture, its place in a row is empty.
"""

from __future__ import annotations

from paceline.reproduce.r2sp.contention import fig1, fig2, fig8, fig9, table1
from paceline.reproduce.r2sp.hardware import fig7a, fig11, fig12
from paceline.reproduce.r2sp.theory import map, staleness
from paceline.reproduce.r2sp.unequal import fig5, table2

__all__ = ["fig1", "fig2", "fig5", "fig7a", "fig8", "fig9", "fig11", "fig12", "map", "staleness", "table1", "table2"]
