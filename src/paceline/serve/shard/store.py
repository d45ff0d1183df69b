"""What a shard holds: its slice of the model, the updates that wait for a decision, and what was received already.

It is driven by orders of the log, one after the other, and knows no socket and no thread. So a recorded run is
replayed by the same code that ran it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from paceline.model.correction import Correction
from paceline.model.similarity import Products, products
from paceline.model.slice import Slice
from paceline.serve.wire.messages import AddToSum, ApplyUpdates, DropUpdate, Fence, Identity, KeepUpdate


class Fenced(ValueError):
    """An update of an incarnation that is over."""


class HeldUpdate(NamedTuple):
    """An update that has arrived, and the learning rate of each parameter group that came with it."""

    gradient: torch.Tensor
    rates: tuple[float, ...]


@dataclass
class RunningSum:
    """Updates added up, and the learning rates of the last of them."""

    total: torch.Tensor
    rates: tuple[float, ...]
    count: int = 1


def in_step(correct: Correction, turns: int) -> Correction:
    """How a step is made that is one of so many in a round. If it is the only one, nothing is stale or need be kept."""
    return correct if turns > 1 else "none"


class Store:
    """What all shards have: slices of the model at a version, and whom they accept updates from."""

    def __init__(self, slices: Sequence[Slice], correct: Correction = "none") -> None:
        self.slices, self.correct = tuple(slices), correct
        self.version = -1  # of the weights; -1: there are none yet
        self._fence: dict[int, int] = {}  # worker → the oldest incarnation that is accepted
        self._spare: list[list[torch.Tensor]] = [[] for _ in slices]

    def room(self, piece: int = 0) -> torch.Tensor:
        """A buffer to receive an update of a slice into. Give it to `put`, or back with `free`."""
        spare = self._spare[piece]
        return spare.pop() if spare else torch.empty_like(self.slices[piece].weights)

    def free(self, piece: int, buffer: torch.Tensor) -> None:
        self._spare[piece].append(buffer)

    def steps_ahead(self, expected: int | None, since: int = 0) -> int:
        """Over how many steps weights are predicted that will be used so many after a version, `since` that version."""
        return 0 if expected is None or self.correct == "none" else max(0, expected - since)

    def accepts(self, worker: int, incarnation: int) -> bool:
        return incarnation >= self._fence.get(worker, 0)

    def fence(self, worker: int, incarnation: int) -> None:
        """Of this worker, nothing older than this incarnation is accepted any more."""
        self._fence[worker] = max(incarnation, self._fence.get(worker, 0))

    def fault(self, held: HeldUpdate, piece: int = 0, looked_at: bool = False) -> str | None:
        """One sentence if an update must not come near the model. looked_at: its elements are known to be finite."""
        part = self.slices[piece]
        groups = len(part.spec.settings_of_groups)
        if len(held.rates) != groups or not all(math.isfinite(rate) and rate >= 0 for rate in held.rates):
            return f"there must be {groups} learning rates from 0 up, not {list(held.rates)!r:.80}"
        return None if looked_at else part.check(held.gradient)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """All that is needed to go on from here; the tensors are the live ones."""
        tensors, pieces = dict[str, torch.Tensor](), []
        for number, part in enumerate(self.slices):
            of_it, meta = part.state()
            tensors |= {f"{number}/{name}": tensor for name, tensor in of_it.items()}
            pieces.append(meta)
        return tensors, {"pieces": pieces}

    def load(self, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
        """Take over what `state` gave. ValueError if it does not belong here."""
        pieces = meta.get("pieces") if isinstance(meta, dict) else None
        if not isinstance(pieces, list) or not all(isinstance(its, dict) for its in pieces):
            raise ValueError("the checkpoint is damaged: it does not say which pieces it holds")
        if len(pieces) != len(self.slices):
            raise ValueError(
                "the checkpoint was cut otherwise: resume with as many servers, and --apply, as there were"
            )
        for number, (part, its) in enumerate(zip(self.slices, pieces, strict=True)):
            prefix = f"{number}/"
            mine = {name: each for name, each in tensors.items() if name.startswith(prefix)}
            part.load({name.removeprefix(prefix): each for name, each in mine.items()}, its)


class WholeStore(Store):
    """One slice of the model, and updates that count when they are whole."""

    def __init__(self, part: Slice, correct: Correction = "none") -> None:
        super().__init__((part,), correct)
        self.slice = part
        self._waiting: dict[Identity, HeldUpdate] = {}
        self._newest: dict[int, tuple[int, int]] = {}  # worker → the newest (incarnation, iteration) that is in
        self._kept: dict[int, HeldUpdate] = {}
        self._slot_of: dict[Identity, int] = {}
        self._sums: dict[int, RunningSum] = {}
        self._sum_of: dict[Identity, int] = {}
        self.products: Products | None = None  # of the updates last applied, if they were to be compared

    def put(self, update: Identity, held: HeldUpdate) -> bool:
        """An update is in, whole. False if it was in already: sent twice, it is applied once."""
        if not self.accepts(update.worker, update.incarnation):
            self.free(0, held.gradient)
            raise Fenced("This worker has been given up; it must join again.")
        if (update.incarnation, update.iteration) <= self._newest.get(update.worker, (0, 0)):
            self.free(0, held.gradient)
            return False
        self._newest[update.worker] = (update.incarnation, update.iteration)
        self._waiting[update] = held
        return True

    def is_added(self, update: Identity) -> bool:
        """Is it in a running sum?"""
        return update in self._sum_of

    def held(self, update: Identity) -> HeldUpdate:
        """An update that the log names."""
        slot = self._slot_of.get(update)
        return self._waiting[update] if slot is None else self._kept[slot]

    def apply(self, order: ApplyUpdates) -> None:
        """Change the weights. The version follows with `applied`, so that both can be done under different locks."""
        if order.sums:
            parts = [HeldUpdate(each.total, each.rates) for each in (self._sums[number] for number, _ in order.sums)]
            weights = tuple(factor for _, factor in order.sums)
        else:
            parts, weights = [self.held(update) for update in order.updates], order.weights
        gradients = [part.gradient for part in parts]
        self.products = products(gradients, weights) if order.compare and not order.sums else None
        if order.mix is None:
            correct = in_step(self.correct, order.turns)
            self.slice.step(gradients, weights, parts[-1].rates, correct, order.turns, sum(order.weights))
        else:
            self.slice.mix(gradients, weights, order.mix)

    def applied(self, order: ApplyUpdates) -> None:
        """The weights have changed: this is the new version."""
        self.version = order.version
        for update in order.updates:
            self._release(update)

    def carry_out(self, order: AddToSum | DropUpdate | KeepUpdate | Fence) -> None:
        """The orders that do not touch the weights."""
        match order:
            case AddToSum(update, number, weight):
                self._add(update, number, weight)
            case DropUpdate(update):
                self._release(update)
            case KeepUpdate(update, slot):
                if slot in self._kept:
                    self.free(0, self._kept[slot].gradient)
                self._kept[slot] = self._waiting.pop(update)
                self._slot_of = {known: at for known, at in self._slot_of.items() if at != slot} | {update: slot}
            case Fence(worker, incarnation):
                self.fence(worker, incarnation)

    def _release(self, update: Identity) -> None:
        """An update is decided: its buffer may be used again."""
        held = self._waiting.pop(update, None)
        if held is not None:
            self.free(0, held.gradient)
        number = self._sum_of.pop(update, None)
        if number is not None:
            known = self._sums[number]
            known.count -= 1
            if not known.count:  # the last of them: all were applied, or all dropped
                self.free(0, self._sums.pop(number).total)

    def _add(self, update: Identity, number: int, weight: float) -> None:
        held = self._waiting.pop(update)
        self._sum_of[update] = number
        known = self._sums.get(number)
        if known is None:
            held.gradient.mul_(weight)
            self._sums[number] = RunningSum(held.gradient, held.rates)
        else:
            known.total.add_(held.gradient, alpha=weight)
            known.count, known.rates = known.count + 1, held.rates
            self.free(0, held.gradient)
