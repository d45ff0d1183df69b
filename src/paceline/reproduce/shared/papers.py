"""Finds papers, and their tables and figures, by name."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import TITLES, Figure

PAPERS = tuple(TITLES)


class UnknownFigureError(ValueError):
    """There is no paper, table or figure of that name. The message lists the names that exist."""


@dataclass(frozen=True)
class PaperFigure:
    """A table or figure of a paper, and the function that reproduces it."""

    id: str
    title: str
    make: Callable[[Request], Figure]
    also: tuple[str, ...] = ()  # other names: its parts, or its numbers in another version of the paper
    numbers: str = ""  # its number in each version of the paper, where the versions differ

    def reproduce(self, request: Request) -> Figure:
        """Return the reproduced figure. Its title names its number in each version of the paper."""
        figure = self.make(request)
        if not self.numbers:
            return figure
        return msgspec.structs.replace(figure, title=f"{figure.title} ({self.numbers})")


@dataclass(frozen=True)
class Paper:
    """A paper and everything in it that is reproduced, in the paper's order."""

    name: str
    title: str
    entries: tuple[PaperFigure, ...]

    def named(self, wanted: Sequence[str]) -> list[PaperFigure]:
        """Return the entries with the wanted names, in the paper's order. With no names, return all entries."""
        known = {name: entry for entry in self.entries for name in (entry.id, *entry.also)}
        for name in wanted:
            if name not in known:
                raise UnknownFigureError(_unknown(f"{self.title} has no table or figure", name, list(known)))
        ids = {known[name].id for name in wanted}
        return [entry for entry in self.entries if not wanted or entry.id in ids]


def paper(name: str) -> Paper:
    """Return the paper of that name."""
    if name not in PAPERS:
        raise UnknownFigureError(_unknown("There is no paper", name, PAPERS))
    # Imported here, because a paper's figures import torch.
    found: Paper = importlib.import_module(f"paceline.reproduce.{name.replace('-', '_')}.figures").PAPER
    return found


def _unknown(what: str, name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{what} {name!r}.{hint} Choose from {', '.join(known)}."
