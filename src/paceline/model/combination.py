"""The gradient and the learning rates of one optimizer step, from updates with weights and rates of their own.

With weight w, learning rate r and gradient g of each update, W = Σ w, and a parameter group at a time:

 - SGD and ASGD move the weights in proportion to the gradient. The step has the mean rate R = Σ w·r / W and the
   gradient Σ w·(r/R)·g. So each update moves the weights by w·r·g, and momentum is scaled by the mean rate. Weight
   decay is part of the gradient, so it is multiplied by W: two updates of weight 1/2 decay the weights as one of
   weight 1 does.
 - All other optimizers divide by the size of the gradient, so a factor of the gradient would have no effect. The step
   has the rate Σ w·r and the gradient Σ w·r·g / Σ w·r, which is a mean. Their weight decay is part of the mean, or is
   multiplied by the rate.

If all updates have the same rate, r/R is exactly 1. If also W = 1, both are the gradient Σ w·g at that rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.model.layout import STATISTICS

#: Optimizers whose step is proportional to the gradient, apart from momentum and weight decay.
LINEAR = ("SGD", "ASGD")
#: A sum of weights that is nearer to 1 than this is 1. Shares of a batch seldom add up to 1 exactly.
NEAR_ONE = 1e-9


@dataclass(frozen=True)
class Term:
    """One update in a step, or the running sum of several."""

    gradient: torch.Tensor  # of the size of the slice
    scale: float  # the factor of the gradient
    rates: tuple[float, ...]  # by parameter group: the learning rate that the gradient is meant for
    weight: float  # Σ w
    weighted_rates: tuple[float, ...]  # by parameter group: Σ w·r
    share: float  # Σ w·clip, the weight of running statistics
    sum_of: RunningSum | None = None  # the running sum that this is, if it is one

    @classmethod
    def of(cls, gradient: torch.Tensor, weight: float, rates: Sequence[float], clip: float = 1.0) -> Term:
        """Return the term of one update. clip: a factor of the gradient that leaves the learning rate as it is."""
        scale = weight * clip
        return cls(gradient, scale, tuple(rates), weight, tuple(weight * rate for rate in rates), scale)

    def add_senders(self, to: torch.Tensor) -> None:
        """Add the weight of this update to each element that is not 0 in it. A sum adds those of its updates."""
        if self.sum_of is None:
            to[self.gradient.nonzero().squeeze(1)] += self.weight
        else:
            assert self.sum_of.senders is not None
            to.add_(self.sum_of.senders, alpha=self.scale)


@dataclass
class RunningSum:
    """The weighted sum of updates that were added one by one."""

    total: torch.Tensor
    rates: list[float]  # by parameter group: the learning rate that the total is meant for
    weight: float
    weighted_rates: list[float]
    share: float  # Σ w·clip
    senders: torch.Tensor | None = None  # by element: Σ w of the updates that have it; None: all have all
    count: int = 1  # of the updates that were added

    @classmethod
    def of(cls, term: Term, sparse: bool = False) -> RunningSum:
        """Return a sum that begins with this term. It uses the term's buffer. sparse: updates have few elements."""
        senders = torch.zeros_like(term.gradient) if sparse else None
        if senders is not None:
            term.add_senders(senders)
        total = term.gradient.mul_(term.scale)
        return cls(total, list(term.rates), term.weight, list(term.weighted_rates), term.share, senders)

    def add(self, term: Term, parts: Sequence[tuple[int, slice]]) -> None:
        """Add a term. parts: the parameter group of each range of the buffer."""
        if self.senders is not None:
            term.add_senders(self.senders)
        if list(term.rates) == self.rates:
            self.total.add_(term.gradient, alpha=term.scale)
        else:
            self._change_unit(term, parts)
            for group, place in parts:
                unit = 1.0 if group == STATISTICS else self.rates[group]
                rate = unit if group == STATISTICS else term.rates[group]
                if rate or not unit:
                    scale = term.scale * (rate / unit if rate != unit else 1.0)
                    self.total[place].add_(term.gradient[place], alpha=scale)
        self.weight += term.weight
        self.share += term.share
        self.weighted_rates = [ours + its for ours, its in zip(self.weighted_rates, term.weighted_rates, strict=True)]
        self.count += 1

    def _change_unit(self, term: Term, parts: Sequence[tuple[int, slice]]) -> None:
        """Forget the gradients that have a rate of 0, in groups in which the new term has another rate."""
        for group, place in parts:
            if group != STATISTICS and not self.rates[group] and term.rates[group]:
                self.total[place].zero_()
        self.rates = [ours or its for ours, its in zip(self.rates, term.rates, strict=True)]

    def term(self, factor: float) -> Term:
        """Return the sum, times a factor, as a term of a step."""
        rated = tuple(factor * each for each in self.weighted_rates)
        return Term(self.total, factor, tuple(self.rates), factor * self.weight, rated, factor * self.share, self)


@dataclass(frozen=True)
class Combination:
    """How the terms of one step are combined."""

    rates: tuple[float, ...]  # of the step, by parameter group
    scales: tuple[tuple[float, ...], ...]  # by parameter group: the factor of each term's gradient
    decay: float  # the factor of weight decay

    @classmethod
    def of(cls, terms: Sequence[Term], optimizer: str) -> Combination:
        """Return how a step of this optimizer combines the terms."""
        weight = math.fsum(term.weight for term in terms)
        if abs(weight - 1) < NEAR_ONE:
            weight = 1.0
        is_linear = optimizer in LINEAR
        plain = tuple(term.scale for term in terms)
        rates, scales = [], []
        for group, first in enumerate(terms[0].rates):
            moved = math.fsum(term.weighted_rates[group] for term in terms)
            is_uniform = math.isclose(moved, first * weight, rel_tol=NEAR_ONE)
            if is_uniform and all(term.rates[group] == first for term in terms):
                mean, own = first, plain
            else:
                mean = moved / weight if weight > 0 else first
                own = tuple(term.scale * term.rates[group] / mean for term in terms) if mean > 0 else plain
            if is_linear or weight <= 0:
                rates.append(mean)
                scales.append(own)
            else:
                rates.append(mean * weight)
                scales.append(tuple(scale / weight for scale in own))
        return cls(tuple(rates), tuple(scales), max(0.0, weight) if is_linear else 1.0)


class Combiner:
    """Finds out how the steps of one slice combine their terms. Most have the weights and rates of the step before."""

    def __init__(self, optimizer: str) -> None:
        self._optimizer = optimizer
        self._last: tuple[object, Combination] | None = None

    def of(self, terms: Sequence[Term]) -> Combination:
        """Return `Combination.of` these terms."""
        key = [(term.scale, term.rates, term.weight, term.weighted_rates) for term in terms]
        if self._last is None or self._last[0] != key:
            self._last = key, Combination.of(terms, self._optimizer)
        return self._last[1]
