"""What the learned policy looks at: the paper's state, and what it leaves out.

A *frame* is the paper's tuple (n, L(ω), L(ω′) − L(ω), ℓ) of one update; the state has those of the last H. The paper's
server does not see how unequal the workers are, nor its optimizer's momentum, which makes stale gradients costly. A
*scene* says so, of the newest update alone.

Every figure is relative: to the number of workers, to the first loss, to the mean step. So nothing depends on how many
workers there are, how large the loss is or how long a step takes. The functions take numbers or arrays alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FRAME = 4
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of the workers: how slow is the slowest of so many?
SCENE = 7 + len(SHARES)
WAIT, ITSELF, ALL, NEXT = range(4)  # the last is an extension of the paper's actions

STEP_WEIGHT = 0.2  # of the newest in a worker's mean step
UNSTEADY_WEIGHT = 0.05  # of the newest in how far steps are from their mean
FAST, SLOW = 0.1, 0.025  # of the newest in the two means of reported losses
UNKNOWN = 1000.0  # times as slow as the others: whoever has not been heard of
WORST = 10.0  # times the first loss: what is higher, or no number at all, counts as this
PATIENCE = 3  # rounds of updates that anybody waits at most


@dataclass(frozen=True)
class StateFeatures:
    """What the network is shown."""

    history: int = 10  # H
    scene: bool = True  # what the paper's state leaves out too
    validated: bool = False  # the loss is of a validation batch, instead of the workers' own reports

    @property
    def size(self) -> int:
        """How many figures that are."""
        return FRAME * self.history + SCENE * self.scene


def is_due(updates: int, workers: int, lasts: bool = True) -> bool:
    """Is a rule chosen anew with this update? What lasts is, once a round, from the first update on."""
    return not lasts or (updates - 1) % workers == 0


def rank(share: float, workers: int) -> int:
    """Of the slowest of so many, in the order of their steps, from 0."""
    return math.ceil(share * workers - 1e-9) - 1


def squashed(x: Any) -> Any:
    """From any number to one between −1 and 1."""
    return x / (1 + abs(x))


def frame(rounds: Any, loss: Any, first: Any, change: Any, stale: Any) -> tuple[Any, ...]:
    """n as rounds, L, ΔL and ℓ as a share of the workers, of one update."""
    return rounds / (rounds + 10), squashed(loss / first), squashed(10 * change / loss), squashed(stale)


def scene(
    rounds: Any,
    loss: Any,
    first: Any,
    slow: Any,
    best: Any,
    rough: Any,
    uneven: Any,
    unsteady: Any,
    momentum: Any,
    paces: Sequence[Any],
) -> tuple[Any, ...]:
    """How training goes, how unequal the workers are, and what the optimizer carries on of its last step.

    slow, best: the loss's mean over a longer time, and its least. rough: how far single losses are from their mean.
    uneven: deviation of the workers' mean steps; unsteady: of a worker's steps from its mean; both in mean steps.
    paces: of each of SHARES, the mean step of the slowest of the quickest so many, by the usual worker's.
    """
    return (
        squashed(10 * (slow - loss) / slow),  # is it falling?
        squashed(5 * (loss - best) / best),  # has it been lower?
        squashed((first / loss - 1) / (rounds + 1)),  # how quickly has it fallen so far?
        squashed(rough / loss),
        squashed(2 * uneven),
        squashed(2 * unsteady),
        momentum,
        *(squashed(pace - 1) for pace in paces),
    )
