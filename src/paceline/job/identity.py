"""The identity of an update: sent twice, it is applied once."""

from __future__ import annotations

from typing import NamedTuple

from paceline.policies import Update


class Identity(NamedTuple):
    """Which update: of which worker, of which of its incarnations, and of which iteration of that incarnation."""

    worker: int
    incarnation: int
    iteration: int


def identity_of(update: Update) -> Identity:
    """The identity that an update carries."""
    return Identity(update.worker, update.incarnation, update.iteration)
