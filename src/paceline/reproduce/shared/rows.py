"""The results of a table or figure: rows with the paper's value beside ours, and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

Where = Literal["simulated", "lab", "gpu", "formula"]
Value = float | str | None

#: Titles of the reproduced papers, by name.
TITLES = {
    "r2sp": "R²SP (INFOCOM 2019, ToN 2026)",
    "fl-r2sp": "FL-R²SP (ToN 2026)",
    "dssp": "DSSP (ICDCS 2019)",
    "rlp": "RLP (ICLR 2020)",
    "hips": "HiPS (NetAI 2018)",
}
#: Parts of a paper that have no table or figure here, and why.
NOT_REPRODUCED = {
    "fl-r2sp": (
        "The appendix, which is supplementary material of the journal, was not available to us. Its experiments on the "
        "FedScale benchmark are not reproduced. For the fraction C there are only our own figures (fractions).",
    ),
    "hips": ("Table 1 needs RoCE hardware.",),
}


class Row(msgspec.Struct, frozen=True):
    """One value of the paper beside ours.

    `paper` is None if the paper gives no value, and `ours` is None if a run did not reach its target. `note` says why.
    """

    id: str
    what: str
    paper: Value
    ours: Value
    unit: str
    where: Where
    note: str = ""


class PlotLine(msgspec.Struct, frozen=True):
    """One curve, or one set of bars, in a plot."""

    name: str
    x: tuple[float | str, ...]
    y: tuple[float | None, ...]


class Plot(msgspec.Struct, frozen=True):
    """One picture.

    In "bars", x holds category names. In "spans", each pair of points is the start and the end of a span. In "cells", a
    heat map, each line is a row.
    """

    title: str
    x: str
    y: str
    lines: tuple[PlotLine, ...]
    kind: Literal["lines", "bars", "steps", "spans", "cells"] = "lines"
    log: bool = False  # logarithmic x axis


class Figure(msgspec.Struct, frozen=True):
    """A table or a figure of a paper, reproduced."""

    id: str
    title: str
    rows: tuple[Row, ...]
    plots: tuple[Plot, ...] = ()
    missing: tuple[str, ...] = ()  # one sentence for each part that could not be run
    paper_heading: str = "paper"  # what the paper's values are, if it does not print them itself

    def lacking(self, what: str) -> Figure:
        """Return the same figure with one more missing part."""
        return msgspec.structs.replace(self, missing=(*self.missing, what))


class Results(msgspec.Struct, frozen=True):
    """All reproduced figures of a paper, and the command, device and date that produced them."""

    paper: str
    command: str
    device: str
    date: str
    figures: tuple[Figure, ...]

    @property
    def rows(self) -> list[Row]:
        return [row for figure in self.figures for row in figure.rows]

    def as_json(self) -> bytes:
        """Return the results as JSON, with the rows of all figures in one top-level list."""
        plain = msgspec.to_builtins(self)
        not_reproduced = list(NOT_REPRODUCED.get(self.paper, ()))
        first = {"paper": plain["paper"], "not_reproduced": not_reproduced, "rows": msgspec.to_builtins(self.rows)}
        plain = first | plain
        for figure in plain["figures"]:
            del figure["rows"]
        return msgspec.json.format(msgspec.json.encode(plain), indent=1)


def read(path: Path) -> Results:
    """Read results that `as_json` wrote. Raise ValueError if the file holds anything else."""
    try:
        plain = msgspec.json.decode(path.read_bytes())
        rows = plain.pop("rows")
        for figure in plain["figures"]:
            figure["rows"] = [row for row in rows if row["id"] == figure["id"]]
        return msgspec.convert(plain, Results)
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} does not hold results of `paceline reproduce`.") from None
