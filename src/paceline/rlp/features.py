"""The state that the network sees: the paper's features, and features that the paper leaves out.

A *frame* is the paper's tuple Tₙ = (n, L(ω), L(ω′) − L(ω), ℓₙ) of one update. The paper's state consists of the frames
of the H most recent updates. The paper's server knows neither how unequal the workers are nor the momentum of its
optimizer, which makes stale gradients costly. The *scene* adds these features, for the newest update only. The *links*
add what the server can know of the network: how much longer than its computation a worker's iteration takes, from Grant
to arrival, and how many workers were running then.

Every feature is relative: to the number of workers, to the first loss, or to the mean step time. So the state depends
neither on the number of workers, nor on the scale of the loss, nor on the length of a step. The functions accept
numbers and arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.policies.components import count_of

FRAME = 4  # features in a frame
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # shares of the workers for which the scene has the slowest one's pace
SCENE = 7 + len(SHARES)  # features in the scene
LINKS = 4  # features of the network
#: The paper's actions ∅ (all idle workers stay idle), {Wₛ} (the worker whose update arrived runs) and W (all idle
#: workers run). NEXT is an extension: the worker whose turn it is in a ring runs. NEXT + n is another: the n workers
#: that have been idle longest run.
WAIT, ITSELF, ALL, NEXT = range(4)

STEP_WEIGHT = 0.2  # weight of the newest step in the mean step time of a worker
JITTER_WEIGHT = 0.05  # weight of the newest step in the mean deviation of steps
FAST, SLOW = 0.1, 0.025  # weights of the newest loss in the two means of reported losses
CHOICE_WEIGHT = 0.2  # weight of the newest Q in its mean over rounds, by which rules that last are chosen
UNKNOWN = 1000.0  # the pace of a worker that has not yet sent an update, relative to the median worker
WORST = 10.0  # times the first loss; a higher loss, or one that is not a number, counts as this
PATIENCE = 3  # rounds of updates after which an idle worker runs, whatever the action


@dataclass(frozen=True)
class StateFeatures:
    """Which features the state has."""

    history: int = 10  # H
    scene: bool = True  # whether the state includes the scene
    validated: bool = False  # whether the loss is that of a validation batch instead of the workers' own losses
    links: bool = True  # whether the state includes the features of the network; only together with the scene

    @property
    def size(self) -> int:
        """The number of features."""
        return FRAME * self.history + (SCENE + LINKS * self.links) * self.scene


def is_due(updates: int, workers: int, lasts: bool = True) -> bool:
    """Return whether the network chooses again at this update.

    It chooses rules that last once a round, beginning with the first update, and single actions at every update.
    """
    return not lasts or (updates - 1) % workers == 0


def longest_idle(count: int) -> int:
    """Return the action that lets this many workers run, those that have been idle longest."""
    return NEXT + count if count > 0 else WAIT


def rank(share: float, workers: int) -> int:
    """Return the index of the slowest worker among this share of the workers, fastest first."""
    return count_of(share, workers) - 1


def squash(x: Any) -> Any:
    """Map any number to one between −1 and 1."""
    return x / (1 + abs(x))


def frame(rounds: Any, loss: Any, first: Any, change: Any, staleness: Any) -> tuple[Any, ...]:
    """Return the frame of one update: n in rounds, L, ΔL, and ℓ as a share of the workers."""
    return rounds / (rounds + 10), squash(loss / first), squash(10 * change / loss), squash(staleness)


def scene(
    rounds: Any,
    loss: Any,
    first: Any,
    slow: Any,
    best: Any,
    noise: Any,
    inequality: Any,
    jitter: Any,
    momentum: Any,
    paces: Sequence[Any],
) -> tuple[Any, ...]:
    """Return the scene: the course of the loss, the inequality of the workers, and the optimizer's momentum.

    slow, best: the mean loss over a longer time, and the least loss. noise: the mean deviation of single losses from
    their mean. inequality: the standard deviation of the workers' mean steps; jitter: the mean deviation of a worker's
    steps from its mean; both relative to the mean step. paces: for each of SHARES, the mean step of the slowest worker
    among this share of the fastest workers, relative to the median worker's.
    """
    return (
        squash(10 * (slow - loss) / slow),  # whether the loss is falling
        squash(5 * (loss - best) / best),  # whether it has been lower
        squash((first / loss - 1) / (rounds + 1)),  # how fast it has fallen so far
        squash(noise / loss),
        squash(2 * inequality),
        squash(2 * jitter),
        momentum,
        *(squash(pace - 1) for pace in paces),
    )


def links(
    members: int, least: Any, transfer: Any, iteration: Any, step: Any, running: Any, gap: Any
) -> tuple[Any, ...]:
    """Return the features of the network, from means over recent updates.

    iteration: seconds from Grant to arrival; step: seconds of the computation; transfer: the difference; least: the
    least of all such differences, in which hardly any other transfer was in the way. running: the number of workers
    that were running when an update arrived. gap: seconds between two arrivals.
    """
    return (
        transfer / iteration,  # the share of an iteration in which its worker does not compute
        squash(5 * least / step),  # the time of one transfer alone, in tenths of a step
        running / members,
        squash(members * gap / step),  # the time of a round, in steps
    )
