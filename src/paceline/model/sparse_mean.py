"""The mean of updates that have few of their elements each: of every element, over the workers that send it.

An update of one of N workers counts an Nth. If all send other elements, each of them would move by an Nth of what its
sender found. So a step is divided by the share of the workers that send an element within a round. Under a barrier the
updates of the step itself show it. By turns it is estimated by a running mean over about a round, which is rather too
high: an element that one of eight workers sends in each round moves by two thirds of what this worker has found.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.model.combination import Term

SMALLEST = 1e-9  # nobody sends an element whose share is smaller, and its step is 0


class SparseMean:
    """Divides steps by the shares of the workers that send each element."""

    def __init__(self, like: torch.Tensor) -> None:
        """like: a tensor of the size of the steps."""
        self.shares = torch.ones_like(like)  # all workers send all elements, until updates show less

    def of(self, step: torch.Tensor, terms: Sequence[Term]) -> torch.Tensor:
        """Return the step of these terms, divided by the shares. The weights of a round sum to 1."""
        weight = sum(term.weight for term in terms)
        if weight <= 0:
            return step
        senders = torch.zeros_like(step)
        for term in terms:
            term.add_senders(senders)
        self.shares.lerp_(senders.div_(weight), min(1.0, weight))
        return torch.div(step, self.shares.clamp(min=SMALLEST))
