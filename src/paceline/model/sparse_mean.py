"""The mean of updates that have few of their elements each: of every element, over the workers that send it.

An update of one of N workers counts an Nth. If each worker sends other elements, each element would move by an Nth of
its sender's value. So the steps of a round are summed, and the sum is divided by the share of the workers that have
sent the element. Before a round is over, that share is not known. So the divisor is the larger of two shares: that of
this round so far, and that of the last round. If all workers begin to send an element at once, the first of them moves
it by this worker's value, and each of the others moves it to the mean of the values so far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from paceline.model.combination import Term

ROUNDING = 1e-6  # of the weight of a round
STATE = ("round_sum", "round_share", "last_share")  # the names of the tensors in a checkpoint


class SparseMean:
    """Divides steps by the shares of the workers that send each element."""

    def __init__(self, like: torch.Tensor) -> None:
        """like: a tensor of the size of the steps."""
        self._sum = torch.zeros_like(like)  # of the steps of this round
        self._share = torch.zeros_like(like)  # by element: the weight of the updates of this round that have it
        self._last = torch.ones_like(like)  # the share in the last round; before the first round, all workers
        self._result = torch.zeros_like(like)  # kept, because allocating new pages takes long
        self.weight = 0.0  # of the steps of this round

    def of(self, step: torch.Tensor, terms: Sequence[Term]) -> torch.Tensor:
        """Return how far the step of these terms moves each element. The next step overwrites the result.

        The weights of a round sum to 1, or nearly.
        """
        weight = sum(term.weight for term in terms)
        if weight <= 0:
            return step
        if self.weight > 0 and self.weight + weight > 1 + ROUNDING:
            self._begin_round()
        self.weight += weight
        senders = self._result.zero_()
        for term in terms:
            term.add_senders(senders)
        at = senders.nonzero().squeeze(1)
        before = self._moved(at)
        self._sum[at] += step[at]
        self._share[at] += senders[at]
        result = self._result.zero_()
        result[at] = self._moved(at).sub_(before)
        return result

    def _begin_round(self) -> None:
        self._share, self._last = self._last, self._share.clamp_(max=1.0)
        self._share.zero_()
        self._sum.zero_()
        self.weight = 0.0

    def _moved(self, at: torch.Tensor) -> torch.Tensor:
        """Return how far this round has moved these elements. An update that weighs more than 1 is not divided."""
        share = torch.maximum(self._share[at], self._last[at])
        return self._sum[at] / share.clamp_(1e-9, 1.0)  # the sum is 0 where the share is

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the state. They are not copies."""
        return dict(zip(STATE, (self._sum, self._share, self._last), strict=True))

    def load(self, tensors: Mapping[str, torch.Tensor], weight: object) -> None:
        """Go on from a saved state and its weight. A checkpoint of a job with other updates has neither."""
        saved, own = [tensors[name] for name in STATE if name in tensors], list(self.state().values())
        if not saved:
            return
        fit = [(each.shape, each.dtype) for each in saved] == [(each.shape, each.dtype) for each in own]
        if not (fit and isinstance(weight, int | float) and 0 <= weight < math.inf):
            raise ValueError("the checkpoint is damaged: it does not hold the senders of each element as float32")
        for ours, its in zip(own, saved, strict=True):
            ours.copy_(its)
        self.weight = weight
