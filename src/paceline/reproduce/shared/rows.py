"""What a table or figure comes to: rows with the paper's figure beside ours, and lines to be drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

Where = Literal["simulated", "lab", "gpu", "formula"]
Value = float | str | None

#: The papers that are reproduced, by name.
TITLES = {
    "r2sp": "R²SP (INFOCOM 2019, ToN 2026)",
    "fl-r2sp": "FL-R²SP (ToN 2026)",
    "dssp": "DSSP (ICDCS 2019)",
    "rlp": "RLP (ICLR 2020)",
    "hips": "HiPS (NetAI 2018)",
}


class Row(msgspec.Struct, frozen=True):
    """One figure of the paper's and ours. None: the paper gives none, or ours was not reached; `note` says why."""

    id: str
    what: str
    paper: Value
    ours: Value
    unit: str
    where: Where
    note: str = ""


class PlotLine(msgspec.Struct, frozen=True):
    """To be drawn: a curve, or one set of bars."""

    name: str
    x: tuple[float | str, ...]
    y: tuple[float | None, ...]


class Plot(msgspec.Struct, frozen=True):
    """One picture. Bars have words along x; a span goes from one x to the next, at their y; cells have a row a line."""

    title: str
    x: str
    y: str
    lines: tuple[PlotLine, ...]
    kind: Literal["lines", "bars", "steps", "spans", "cells"] = "lines"
    log: bool = False  # along x


class Figure(msgspec.Struct, frozen=True):
    """A table or a figure of a paper, reproduced."""

    id: str
    title: str
    rows: tuple[Row, ...]
    plots: tuple[Plot, ...] = ()
    missing: tuple[str, ...] = ()  # what could not be run, a sentence each


class Results(msgspec.Struct, frozen=True):
    """All of them, and how they were come by."""

    paper: str
    command: str
    device: str
    date: str
    figures: tuple[Figure, ...]

    @property
    def rows(self) -> list[Row]:
        return [row for figure in self.figures for row in figure.rows]

    def as_json(self) -> bytes:
        """With all rows in one list, for those who want nothing else."""
        plain = msgspec.to_builtins(self)
        plain = {"paper": plain["paper"], "rows": msgspec.to_builtins(self.rows)} | plain
        for figure in plain["figures"]:
            del figure["rows"]
        return msgspec.json.format(msgspec.json.encode(plain), indent=1)


def read(path: Path) -> Results:
    """What `as_json` wrote. Whatever else is there: ValueError with one sentence."""
    try:
        plain = msgspec.json.decode(path.read_bytes())
        rows = plain.pop("rows")
        for figure in plain["figures"]:
            figure["rows"] = [row for row in rows if row["id"] == figure["id"]]
        return msgspec.convert(plain, Results)
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} does not hold results of `paceline reproduce`.") from None
