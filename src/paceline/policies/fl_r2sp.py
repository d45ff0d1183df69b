"""FL-R²SP (ToN 2026, section IV-B and algorithm 2): round robin across groups of federated clients.

Client i belongs to group i mod M. A group's updates are aggregated when at least a fraction C of its members has
returned: ⌈C·n⌉ of n. Later updates are discarded, and their clients receive the newest model. Groups refine the global
model in a fixed order, at least T/M apart. T is an exponential moving average of the time from a group's Grant to its
quorum. (If T included the wait for the turn, every round would last at least T, and T could only grow.) Outliers are
left out (`filtered`).

`as_printed=true` follows the paper to the letter. The default differs in three ways:
 - `moves=update`. In the paper, a group moves the global model to (M−1)/M of itself plus 1/M of the group's mean model
   (algorithm 2, line 16; `moves=model`). But that mean model started from a global model that is M−1 turns old, so each
   turn also undoes a part of what the other groups have done since. If all groups move the model steadily in one
   direction, it keeps M/(2M−1) of the movement, about half. Adding 1/M of the group's mean *change* keeps all of it.
 - `weights=mean`. In the paper, a group's model is the plain average of its clients' models (line 8; `weights=equal`).
   By default a client counts by its number of samples, as in FedAvg, so that all samples count alike.
 - `relative=true,beta=0.8,strikes=5`. The paper blacklists a client whose cosine is below 0.5 for three consecutive
   rounds (section VI-B1; `relative=false,beta=0.5,strikes=3`). `filtered` says why no fixed threshold works.

The policy is a composition: `filtered` around `groups`, with a barrier (`bsp:fraction=C`) inside the groups and `r2sp`
across them.
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
from paceline.policies.options import PolicyError, Range, options_of, shown
from paceline.policies.r2sp import R2SP


class _Mixing(Groups):
    """Groups whose mean model is mixed into the global model, by the total weight of their updates."""

    def __init__(self, count: int, inner: Policy, outer: Policy) -> None:
        super().__init__(count, inner, outer)
        self.mixes = True

    def _apply(self, outer_apply: Apply, out: Decisions) -> None:
        applies: Decisions = []
        super()._apply(outer_apply, applies)
        for apply in applies:
            assert isinstance(apply, Apply)
            share = sum(apply.weights)
            weights = tuple(weight / share for weight in apply.weights)
            sums = tuple((number, factor / share) for number, factor in apply.sums)
            out.append(replace(apply, weights=weights, mix=min(1.0, share), sums=sums))


class FLR2SP(Filtered):
    summary = "groups of clients take turns; stragglers and outliers are left out (federated)"

    def __init__(
        self,
        groups: Annotated[int, Range(1), "M, the number of groups; a client's group is its id mod M"] = 8,
        fraction: Annotated[
            float, Range(0, 1, open_low=True), "C, the fraction of a group to wait for, rounded up"
        ] = 0.75,
        relax: Annotated[float, Range(0, open_low=True), "the gap between two turns, in units of T/M"] = 1.0,
        patience: Annotated[float, Range(0, open_low=True), "how long a group may be overdue, in units of T"] = 4.0,
        weights: Annotated[
            Literal["mean", "equal"], "how clients count. mean: by their number of samples; equal: all alike"
        ] = "mean",
        moves: Annotated[
            Literal["update", "model"],
            "how a group moves the model. update: by its mean change; model: towards its mean model, as in the paper",
        ] = "update",
        filter: Annotated[bool, "leave outliers out"] = True,
        beta: Annotated[float, Range(-1, 1), "β, the cosine below which a client is an outlier"] = 0.8,
        relative: Annotated[
            bool, "measure β in units of the median cosine of the updates applied together; false: the paper's rule"
        ] = True,
        strikes: Annotated[int, Range(1), "the number of a client's latest updates to judge"] = 5,
        retest: Annotated[
            int, Range(0), "model versions after which a blacklisted client is tried again; 0: never"
        ] = 0,
        as_printed: Annotated[
            bool, "the paper to the letter: sets moves=model, weights=equal, relative=false, beta=0.5 and strikes=3"
        ] = False,
    ) -> None:
        if as_printed:
            _must_be_free(moves=moves, weights=weights, relative=relative, beta=beta, strikes=strikes)
            moves, weights, relative, beta, strikes = "model", "equal", False, 0.5, 3
        # To be compared, updates must be held until they are applied. A running sum would not hold them.
        inner = BSP(fraction=fraction, weights=weights, running=not filter)
        self.outer = R2SP(relax=relax, patience=patience, weights="equal")
        self.outer.pace = MeanIterationTime()
        self.outer.sorted_ids = []  # groups take turns in the order of their numbers
        self.outer.starts_together = True  # a round is too long for all other groups to wait for a pilot
        composed = _Mixing if moves == "model" else Groups
        super().__init__(composed(groups, inner, self.outer), beta, relative, strikes, retest)
        self.compares = filter
        # The clients' links are the bottleneck: only a whole group can fill the server's link.
        self.takes_turns = False
        self.count = groups

    @property
    def least_workers(self) -> int:
        return self.count

    def memory(self) -> dict[str, Any]:
        turn = next((group for seat in self.outer.ring for group in seat.members), None)
        return super().memory() | {"T": self.outer.pace.T, "turn": turn}

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Restore the blacklist, T and the group that has the turn. With T known, groups start one gap apart."""
        super().recall(memory)
        match memory.get("T"):
            case float() | int() as T if T > 0:
                self.outer.pace.T = float(T)
        match memory.get("turn"):
            case int() as turn:
                self.outer.first_turn = turn


def _must_be_free(**given: Any) -> None:
    """Raise PolicyError if one of these options has another value than its default: as_printed=true sets it."""
    options = options_of(FLR2SP.__init__)
    for name, value in given.items():
        if value != options[name].default:
            raise PolicyError(f"fl-r2sp: as_printed=true sets {name}, so leave {name}={shown(value)} out.")
