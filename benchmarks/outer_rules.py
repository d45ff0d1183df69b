"""Outer rules: how a server adds the differences of workers that make local steps, and what a worker pulls then.

Rules are linear. So the values of a state need not be models: `outer.py` passes rows of coefficients, and learns how a
round changes everything that the server and its workers keep.

A rule with one worker is synchronous: that worker stands for all of them, or for their mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Value = NDArray[np.float64]


@dataclass
class State:
    """The server's model and momentum, and for each worker the places where it is, started, and ended the time before.

    `seen` is the server's model that a worker received last.
    """

    model: Value
    momentum: Value
    summed: Value
    local: list[Value]
    start: list[Value]
    ended: list[Value]
    seen: list[Value]
    turns: int = 0

    @property
    def workers(self) -> int:
        return len(self.local)


@dataclass(frozen=True)
class Rule:
    """A rule's `update(state, worker, end)` returns what the worker pulls, and leaves the server's new model.

    `pulls` is the number of a worker's pulls in a round. At those between its turns it adds what the server has moved,
    to where it is and to where it started, and goes on.
    """

    name: str
    update: Callable[[State, int, Value], Value]
    pulls: int = 1

    def exchange(self, state: State, worker: int) -> None:
        """Carry out the turn of a worker."""
        state.turns += 1
        end = state.local[worker]
        pulled = self.update(state, worker, end)
        state.ended[worker] = end
        state.local[worker] = state.start[worker] = pulled
        state.seen[worker] = state.model

    def pull(self, state: State, worker: int) -> None:
        """Carry out a pull between two turns of a worker."""
        moved = state.model - state.seen[worker]
        state.local[worker] = state.local[worker] + moved
        state.start[worker] = state.start[worker] + moved
        state.seen[worker] = state.model


def averaging(rate: float = 1.0, pulls: int = 1) -> Rule:
    """Each difference counts 1/N. This is what a server without an outer optimizer does."""

    def update(state: State, worker: int, end: Value) -> Value:
        state.model = state.model + rate / state.workers * (end - state.start[worker])
        return state.model

    name = "averaging" + (f", rate {rate:g}" if rate != 1 else "") + (f", {pulls} pulls a round" if pulls > 1 else "")
    return Rule(name, update, pulls)


def nesterov(rate: float = 0.7, beta: float = 0.9, *, per: str = "round", full: bool = False) -> Rule:
    """Nesterov's momentum at every difference. It decays by β per turn, or per round and then adds up to the same.

    A difference counts 1/N, or in full.
    """

    def update(state: State, worker: int, end: Value) -> Value:
        difference = (end - state.start[worker]) / (1 if full else state.workers)
        decay = beta ** (1 / state.workers) if per == "round" else beta
        scale = (1 - decay) / (1 - beta)
        state.momentum = decay * state.momentum + scale * difference
        state.model = state.model + rate * (scale * difference + decay * state.momentum)
        return state.model

    return Rule(f"Nesterov {rate:g}/{beta:g}, {'differences in full' if full else f'β per {per}'}", update)


def delayed_nesterov(rate: float = 0.7, beta: float = 0.9) -> Rule:
    """Delayed Nesterov (Liu et al., 2024, with c = 0): the momentum changes, and counts, at every N-th difference."""

    def update(state: State, worker: int, end: Value) -> Value:
        difference = (end - state.start[worker]) / state.workers
        state.summed = state.summed + difference
        state.model = state.model + rate * difference
        if state.turns % state.workers == 0:
            state.momentum = beta * state.momentum + state.summed
            state.model = state.model + rate * beta * state.momentum
            state.summed = 0 * state.summed
        return state.model

    return Rule(f"delayed Nesterov {rate:g}/{beta:g}", update)


def mean_of_ends() -> Rule:
    """The model is the mean of all workers' newest end points."""

    def update(state: State, worker: int, end: Value) -> Value:
        state.model = newest_mean(state, worker, end)
        return state.model

    return Rule("mean of end points", update)


def nesterov_to_ends(rate: float = 0.7, beta: float = 0.9) -> Rule:
    """Nesterov's momentum towards the mean of the newest end points; a turn makes 1/N of a round's way."""

    def update(state: State, worker: int, end: Value) -> Value:
        way = (newest_mean(state, worker, end) - state.model) / state.workers
        decay = beta ** (1 / state.workers)
        scale = (1 - decay) / (1 - beta)
        state.momentum = decay * state.momentum + scale * way
        state.model = state.model + rate * (scale * way + decay * state.momentum)
        return state.model

    return Rule(f"Nesterov {rate:g}/{beta:g} towards that mean", update)


def newest_mean(state: State, worker: int, end: Value) -> Value:
    """Return the mean of the newest end points, where the worker has just ended at `end`."""
    ends = [*state.ended[:worker], end, *state.ended[worker + 1 :]]
    mean: Value = np.mean(ends, axis=0)
    return mean


def compensated(gain: float = 1.0) -> Rule:
    """Each difference less `gain` times what the server has moved since the pull.

    That would be exact in directions of this gain. With 1 it is elastic averaging (Zhang et al., 2015).
    """

    def update(state: State, worker: int, end: Value) -> Value:
        moved = state.model - state.start[worker]
        state.model = state.model + (end - state.start[worker] - gain * moved) / state.workers
        return state.model

    return Rule(f"compensated for a gain of {gain:g}", update)


def own_part(share: float = 0.5) -> Rule:
    """Averaging, but the worker goes on with a share of the part of its own difference that was not added.

    With a share of 1 that is the server's model before the turn, and the whole difference.
    """

    def update(state: State, worker: int, end: Value) -> Value:
        difference = end - state.start[worker]
        state.model = state.model + difference / state.workers
        return state.model + share * (1 - 1 / state.workers) * difference

    return Rule(f"keeps {share:g} of its own part", update)


def anchored(anchor: float = 0.4) -> Rule:
    """Differences from a point between the pulled model (its weight is the anchor) and the worker's last end point.

    With 1 it is averaging, and with 0 the sum of what moves the mean of end points. In between, nothing drags: a
    worker sends back a part of what its last pull changed.
    """

    def update(state: State, worker: int, end: Value) -> Value:
        start = anchor * state.start[worker] + (1 - anchor) * state.ended[worker]
        state.model = state.model + (end - start) / state.workers
        return state.model

    return Rule(f"anchored, {anchor:g}", update)


def half_momentum(rate: float = 1.5, beta: float = 0.9) -> Rule:
    """Half of a difference counts at once, the other half goes through a momentum that decays by β per round.

    This is quasi-hyperbolic momentum (Ma and Yarats, 2019) with ν = 1/2.
    """

    def update(state: State, worker: int, end: Value) -> Value:
        difference = end - state.start[worker]
        decay = beta ** (1 / state.workers)
        state.momentum = decay * state.momentum + (1 - decay) * difference
        state.model = state.model + rate / state.workers * (difference + state.momentum) / 2
        return state.model

    return Rule(f"half momentum {rate:g}/{beta:g}", update)


def beginning_ahead(ahead: float = 0.5, keep: float = 0.0, anchor: float = 1.0) -> Rule:
    """A worker begins ahead of the model, by a part of what this has moved since the worker's last turn.

    With `keep`, it begins between there and its own end point, which has this weight.
    """
    difference = anchored(anchor).update

    def update(state: State, worker: int, end: Value) -> Value:
        model = difference(state, worker, end)
        begins = model + ahead * (model - state.seen[worker])
        return begins + keep * (end - begins)

    parts = [f"anchored, {anchor:g}"] * (anchor != 1) + [f"ahead by {ahead:g}"] * (ahead != 0)
    return Rule(", ".join([*parts, *[f"keeps {keep:g} of its end point"] * (keep != 0)]), update)
