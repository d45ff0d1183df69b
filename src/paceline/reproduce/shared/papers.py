"""Every table and figure by its name."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import TITLES, Figure

PAPERS = tuple(TITLES)


class UnknownFigureError(ValueError):
    """One sentence with the names that there are."""


@dataclass(frozen=True)
class PaperFigure:
    """A table or figure: what it shows, and the function that reproduces it."""

    id: str
    title: str
    make: Callable[[Request], Figure]
    also: tuple[str, ...] = ()  # its numbers in another version of the paper


@dataclass(frozen=True)
class Paper:
    name: str
    title: str
    entries: tuple[PaperFigure, ...]

    def named(self, wanted: Sequence[str]) -> list[PaperFigure]:
        """The entries of these names, in the paper's order; all if none is named."""
        known = {name: entry for entry in self.entries for name in (entry.id, *entry.also)}
        for name in wanted:
            if name not in known:
                raise UnknownFigureError(_unknown(f"{self.title} has nothing of the name", name, list(known)))
        ids = {known[name].id for name in wanted}
        return [entry for entry in self.entries if not wanted or entry.id in ids]


def paper(name: str) -> Paper:
    """The paper of that name."""
    if name not in PAPERS:
        raise UnknownFigureError(_unknown("There is no paper", name, PAPERS))
    found: Paper = importlib.import_module(
        f"paceline.reproduce.{name.replace('-', '_')}.figures"
    ).PAPER  # only now: it brings torch along
    return found


def _unknown(what: str, name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"{what} {name!r}; {f'did you mean {near[0]!r}? ' if near else ''}there are {', '.join(known)}."
