"""The mean of updates that have few of their elements each: of every element, over the workers that send it.

An update of one of N workers counts an Nth. If all send other elements, each of them would move by an Nth of what its
sender found. So what the steps of a round sum to is divided by the share of the workers that send an element. By turns,
the first workers of a round do not know who follows: the share is the larger of those of this round, as far as it has
come, and of the last round. An element that all workers begin to send at once moves with the first of them as far as
this one found, and with each of the others to the mean of those that have sent it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from paceline.model.combination import Term

SMALLEST = 1e-9  # a share below it is of an element that nobody sends: its steps sum to 0
WHOLE = 1 - 1e-6  # the weight of a round, but for rounding
STATE = ("round_sum", "senders", "last_senders")  # the names of the tensors in a checkpoint


class SparseMean:
    """Divides steps by the shares of the workers that send each element."""

    def __init__(self, like: torch.Tensor) -> None:
        """like: a tensor of the size of the steps."""
        self._sum = torch.zeros_like(like)  # of the steps of this round
        self._senders = torch.zeros_like(like)  # by element: the weight of the updates of this round that have it
        self._last = torch.ones_like(like)  # the share of the senders in the last round; before the first one, all
        self.weight = 0.0  # of the steps of this round

    def of(self, step: torch.Tensor, terms: Sequence[Term]) -> torch.Tensor:
        """Return how far the step of these terms moves each element. The weights of a round sum to 1."""
        weight = sum(term.weight for term in terms)
        if weight <= 0:
            return step
        if self.weight > WHOLE:
            self._begin_round()
        before = self._moved()
        self.weight += weight
        self._sum += step
        for term in terms:
            term.add_senders(self._senders)
        return self._moved().sub_(before)

    def _begin_round(self) -> None:
        torch.div(self._senders, self.weight, out=self._last)
        self._sum.zero_()
        self._senders.zero_()
        self.weight = 0.0

    def _moved(self) -> torch.Tensor:
        """Return how far this round has moved each element."""
        share = torch.div(self._senders, max(1.0, self.weight))
        torch.maximum(share, self._last, out=share).clamp_(min=SMALLEST)
        return torch.div(self._sum, share, out=share)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the state. They are not copies."""
        return dict(zip(STATE, (self._sum, self._senders, self._last), strict=True))

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
