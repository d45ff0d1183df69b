"""FL-R²SP (ToN 2026, section IV-B and algorithm 2): round robin across groups of federated clients.

Client i belongs to group i mod M. A group's updates are aggregated once a fraction C of its members has returned; what
comes later is ignored, and its sender is given the newest model. Groups refine the global model in a fixed order, at
least T/M apart, where T is an exponential moving average of the time from a group's Grant to its quorum. (Not to its
turn: then every round would last at least T, and T could only grow.) Outliers are left out (`filtered`).

How a group refines the model: the paper sets it to (M−1)/M of itself and 1/M of the group's mean (`moves=model`).
But that mean was made from a model that is M−1 turns old, so each turn also takes back some of what the others have
done since: of a steady march the model keeps M/(2M−1), about half. Adding 1/M of the group's mean *change* keeps all
of it (`moves=update`).

All of it is composed: `filtered` around `groups`, of a barrier (`bsp:fraction=C`) within and `r2sp` across.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from paceline.policies.bsp import BSP
from paceline.policies.components import MeanIterationTime
from paceline.policies.contract import Apply, Decisions, Policy
from paceline.policies.filtered import Filtered
from paceline.policies.groups import Groups
from paceline.policies.options import Range
from paceline.policies.r2sp import R2SP


class _Mixing(Groups):
    """Groups whose mean model is mixed into the global one: by as much as their updates would have weighed."""

    def __init__(self, count: int, inner: Policy, outer: Policy) -> None:
        super().__init__(count, inner, outer)
        self.mixes = True

    def _apply(self, across: Apply, out: Decisions) -> None:
        gradients: Decisions = []
        super()._apply(across, gradients)
        for apply in gradients:
            assert isinstance(apply, Apply)
            share = sum(apply.weights)
            weights = tuple(weight / share for weight in apply.weights)
            sums = tuple((number, factor / share) for number, factor in apply.sums)
            out.append(replace(apply, weights=weights, mix=min(1.0, share), sums=sums))


class FLR2SP(Filtered):
    summary = "groups of clients take turns; stragglers and outliers are left out (federated)"

    def __init__(
        self,
        groups: Annotated[int, Range(1), "M, how many groups; a client's is its id mod M"] = 8,
        fraction: Annotated[float, Range(0, 1, open_low=True), "C, the fraction of a group to wait for"] = 0.75,
        relax: Annotated[float, Range(0, open_low=True), "the gap between turns, in units of T/M"] = 1.0,
        patience: Annotated[float, Range(0, open_low=True), "how overdue a group may be, in units of T"] = 4.0,
        weights: Annotated[
            Literal["mean", "equal"], "mean: a client counts by its samples; equal: all count alike"
        ] = "mean",
        moves: Annotated[
            Literal["update", "model"], "update: by the group's mean change; model: toward its mean, as printed"
        ] = "update",
        filter: Annotated[bool, "leave outliers out"] = True,
        beta: Annotated[float, Range(-1, 1), "β, the cosine below which a client is an outlier"] = 0.8,
        relative: Annotated[bool, "β is in units of what is usual among those applied together"] = True,
        strikes: Annotated[int, Range(1), "over how many of its updates"] = 5,
        retest: Annotated[int, Range(0), "model versions after which a blacklisted one is tried again; 0: never"] = 0,
    ) -> None:
        # To be compared, updates have to be held until they are applied: a group's quorum of them.
        inner = BSP(fraction=fraction, weights=weights, running=not filter)
        self.outer = R2SP(relax=relax, patience=patience, weights="equal")
        self.outer.pace = MeanIterationTime()
        self.outer.numbers = []  # group after group, as they are numbered
        self.outer.starts_together = True  # a round is long, and clients are many: nobody waits for a pilot
        of = _Mixing if moves == "model" else Groups
        super().__init__(of(groups, inner, self.outer), beta, relative, strikes, retest)
        self.compares = filter
        # A client's link is the narrow one: those of a group fill the server's link only together.
        self.takes_turns = False
        self.count = groups

    @property
    def least_workers(self) -> int:
        return self.count

    def memory(self) -> dict[str, Any]:
        turn = next((group for seat in self.outer.ring for group in seat.members), None)
        return super().memory() | {"T": self.outer.pace.T, "turn": turn}

    def recall(self, memory: Mapping[str, Any]) -> None:
        """The blacklist, T, and whose turn it is. With T known groups start one after the other, a gap apart."""
        super().recall(memory)
        match memory.get("T"):
            case float() | int() as T if T > 0:
                self.outer.pace.T = float(T)
        match memory.get("turn"):
            case int() as turn:
                self.outer.first_turn = turn
