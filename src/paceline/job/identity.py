"""The identity of an update. An update that arrives twice is applied once."""

from __future__ import annotations

from typing import NamedTuple

from paceline.policies import Update


class Identity(NamedTuple):
    """The worker that computed an update, the incarnation of that worker, and the iteration of that incarnation."""

    worker: int
    incarnation: int
    iteration: int


def identity_of(update: Update) -> Identity:
    """Return the identity of an update."""
    return Identity(update.worker, update.incarnation, update.iteration)
