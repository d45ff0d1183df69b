"""The store of a shard: its slice of the model, the updates that wait for a decision, and the updates it has received.

A store carries out orders of the log one after the other. It uses no socket and no thread, so the same code replays a
recorded run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from paceline.job.clipping import NOT_CLIPPED, Factors
from paceline.model.combination import RunningSum, Term
from paceline.model.correction import Correction
from paceline.model.similarity import Products
from paceline.model.slice import MAX_RATE, NOT_OF_OPTIMIZER, Slice
from paceline.serve.shard.bases import Bases
from paceline.serve.wire.messages import AddToSum, ApplyUpdates, DropUpdate, Identity, KeepUpdate


class Fenced(ValueError):
    """The incarnation of the worker is over, and the shard accepts nothing from it."""

    def __init__(self) -> None:
        super().__init__("This worker has been given up; it must join again.")


class HeldUpdate(NamedTuple):
    """An update that has arrived, and the learning rate of each parameter group that came with it."""

    gradient: torch.Tensor
    rates: tuple[float, ...]
    size: tuple[float, float, float] | None = None  # as in UpdateReceived
    base: int | None = None  # the version that its model was computed from, if the store knows (`bases.py`)


def step_correction(correct: Correction, turns: int) -> Correction:
    """Return the correction for a step of a round with `turns` steps. A single step is not stale, so it needs none."""
    return correct if turns > 1 else "none"


class Store:
    """The part that all stores share: slices of the model at a version, and the incarnations with access to them."""

    def __init__(self, slices: Sequence[Slice], correct: Correction = "none") -> None:
        self.slices, self.correct = tuple(slices), correct
        self.version = -1  # of the weights; -1: there are none yet
        self._fence: dict[int, int] = {}  # worker → the oldest incarnation that is accepted
        self._spare: list[list[torch.Tensor]] = [[] for _ in slices]

    def take_buffer(self, piece: int = 0) -> torch.Tensor:
        """Return a buffer to receive an update of a piece into. Pass it to `put`, or back to `return_buffer`."""
        spare = self._spare[piece]
        return spare.pop() if spare else torch.empty_like(self.slices[piece].weights)

    def return_buffer(self, piece: int, buffer: torch.Tensor) -> None:
        """Take back a buffer that is no longer used, for the next `take_buffer`."""
        self._spare[piece].append(buffer)

    def steps_ahead(self, expected: int | None, since: int = 0) -> int:
        """Return over how many steps the weights are predicted for a pull.

        expected: the staleness that the policy expects for the update, counted from the granted version.
        since: the number of steps applied since that version. They need no prediction.
        """
        return 0 if expected is None or self.correct == "none" else max(0, expected - since)

    def accepts(self, worker: int, incarnation: int) -> bool:
        """Return whether the shard accepts updates of this incarnation."""
        return incarnation >= self._fence.get(worker, 0)

    def fence(self, worker: int, incarnation: int) -> None:
        """From now on, accept nothing from this worker that is older than this incarnation."""
        self._fence[worker] = max(incarnation, self._fence.get(worker, 0))

    def waiting(self) -> Mapping[Identity, HeldUpdate]:
        """Return the updates that wait for a decision."""
        return {}

    def fault(self, held: HeldUpdate, piece: int = 0, is_checked: bool = False) -> str | None:
        """Return what is wrong with an update, or None if it may change the model.

        is_checked: the elements are known to be finite and not huge, so they are not checked again.
        """
        part = self.slices[piece]
        groups = len(part.spec.settings_of_groups)
        if len(held.rates) != groups or not all(0 <= rate <= MAX_RATE for rate in held.rates):
            return f"it must have {groups} learning rates from 0 to {MAX_RATE:.0f}; got {list(held.rates)!r:.80}"
        return None if is_checked else part.check(held.gradient)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """Return everything that a checkpoint must hold. The tensors are the live ones, not copies."""
        tensors, pieces = dict[str, torch.Tensor](), []
        for number, part in enumerate(self.slices):
            its_tensors, meta = part.state()
            tensors |= {f"{number}/{name}": tensor for name, tensor in its_tensors.items()}
            pieces.append(meta)
        return tensors, {"pieces": pieces}

    def optimizer_state(self) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """Return the part of `state` that the optimizer keeps from one step to the next, without the weights."""
        tensors, meta = self.state()
        others = tuple(f"/{name}" for name in ("weights", *NOT_OF_OPTIMIZER))
        return {name: each for name, each in tensors.items() if not name.endswith(others)}, meta

    def load(self, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
        """Restore what `state` returned. Raise ValueError if it does not fit this shard."""
        pieces = meta.get("pieces") if isinstance(meta, dict) else None
        if not isinstance(pieces, list) or not all(isinstance(its, dict) for its in pieces):
            raise ValueError("the checkpoint is damaged: it does not say which pieces it holds")
        if len(pieces) != len(self.slices):
            raise ValueError(f"the state has {len(pieces)} pieces, and this shard has {len(self.slices)}")
        for number, (part, its) in enumerate(zip(self.slices, pieces, strict=True)):
            prefix = f"{number}/"
            mine = {name: each for name, each in tensors.items() if name.startswith(prefix)}
            part.load({name.removeprefix(prefix): each for name, each in mine.items()}, its)


class WholeStore(Store):
    """One slice of the model, and updates that are applied when they have arrived whole."""

    def __init__(self, part: Slice, correct: Correction = "none", bases: Bases | None = None) -> None:
        """bases: given where models are compared."""
        super().__init__((part,), correct)
        self.slice, self._bases = part, bases
        self._waiting: dict[Identity, HeldUpdate] = {}
        self._newest: dict[int, tuple[int, int]] = {}  # worker → the newest (incarnation, iteration) received
        self._kept: dict[int, HeldUpdate] = {}  # slot → the update in it
        self._slot_of: dict[Identity, int] = {}
        self._sums: dict[int, RunningSum] = {}
        self._sum_of: dict[Identity, int] = {}
        self.products: Products | None = None  # of the updates last applied, if the order asked to compare them

    def put(self, update: Identity, held: HeldUpdate) -> bool:
        """Hold a whole update. Return False if it was received before: an update sent twice is applied once."""
        if not self.accepts(update.worker, update.incarnation):
            self.return_buffer(0, held.gradient)
            raise Fenced
        if (update.incarnation, update.iteration) <= self._newest.get(update.worker, (0, 0)):
            self.return_buffer(0, held.gradient)
            return False
        self._newest[update.worker] = (update.incarnation, update.iteration)
        if self._bases:
            held = held._replace(base=self._bases.take((update.worker, update.incarnation)))
        self._waiting[update] = held
        return True

    def note_pull(self, worker: int, incarnation: int) -> None:
        """Note that a worker has begun to pull the newest weights."""
        if self._bases:
            self._bases.pulled((worker, incarnation), self.version)

    def keep_base(self) -> None:
        """Copy the weights before they change, if models must be compared with them."""
        if self._bases and self._bases.must_keep(self.version, self._waiting_bases()):
            copy = self.take_buffer()
            self._bases.keep(self.version, copy.copy_(self.slice.weights))

    def _waiting_bases(self) -> set[int | None]:
        return {held.base for held in self._waiting.values()}

    def fence(self, worker: int, incarnation: int) -> None:
        super().fence(worker, incarnation)
        if self._bases:
            self._bases.forget(worker, incarnation)

    def waiting(self) -> Mapping[Identity, HeldUpdate]:
        return dict(self._waiting)

    def is_added(self, update: Identity) -> bool:
        """Return whether the update is part of a running sum."""
        return update in self._sum_of

    def held(self, update: Identity) -> HeldUpdate:
        """Return an update that waits for a decision or is kept in a slot."""
        slot = self._slot_of.get(update)
        return self._waiting[update] if slot is None else self._kept[slot]

    def apply(self, order: ApplyUpdates) -> None:
        """Change the weights. `applied` sets the version afterwards, so each can run under a lock of its own."""
        if order.sums:
            self.products, terms = None, [self._sums[number].term(factor) for number, factor in order.sums]
        else:
            parts = [self.held(update) for update in order.updates]
            self.products = self._compare(order, parts) if order.compare else None
            clips = order.clips or (NOT_CLIPPED,) * len(parts)
            terms = [_term(*each) for each in zip(parts, order.weights, clips, strict=True)]
        if order.mix is None:
            self.slice.step_by(terms, step_correction(self.correct, order.turns), order.turns)
        else:
            self.slice.mix([term.gradient for term in terms], [term.scale for term in terms], order.mix)

    def _compare(self, order: ApplyUpdates, parts: Sequence[HeldUpdate]) -> Products | None:
        """Return the products of updates, or None if they are models, and it is not known what they began from."""
        gradients = [part.gradient for part in parts]
        if order.mix is None:
            return self.slice.products(gradients, order.weights)
        bases = self._bases.weights(part.base for part in parts) if self._bases else None
        return None if bases is None else self.slice.products(gradients, order.weights, bases)

    def applied(self, order: ApplyUpdates) -> None:
        """Set the new version after `apply`, and reuse the buffers of its updates."""
        self.version = order.version
        for update in order.updates:
            self._release(update)
        if self._bases:
            for unused in self._bases.release(self._waiting_bases()):
                self.return_buffer(0, unused)

    def carry_out(self, order: AddToSum | DropUpdate | KeepUpdate) -> None:
        """Carry out an order that does not change the weights."""
        match order:
            case AddToSum(update, number, weight, clip):
                self._add(update, number, weight, clip)
            case DropUpdate(update):
                self._release(update)
            case KeepUpdate(update, slot):
                if slot in self._kept:
                    self.return_buffer(0, self._kept[slot].gradient)
                self._kept[slot] = self._waiting.pop(update)
                self._slot_of = {known: at for known, at in self._slot_of.items() if at != slot} | {update: slot}

    def _release(self, update: Identity) -> None:
        """Reuse the buffer of an update that has been applied or dropped."""
        held = self._waiting.pop(update, None)
        if held is not None:
            self.return_buffer(0, held.gradient)
        number = self._sum_of.pop(update, None)
        if number is not None:
            known = self._sums[number]
            known.count -= 1
            if not known.count:  # all updates of the sum were applied, or all were dropped
                self.return_buffer(0, self._sums.pop(number).total)

    def _add(self, update: Identity, number: int, weight: float, clip: Factors) -> None:
        held = self._waiting.pop(update)
        self._sum_of[update] = number
        known = self._sums.get(number)
        self._sums[number] = self.slice.add(_term(held, weight, clip), known)
        if known is not None:
            self.return_buffer(0, held.gradient)


def _term(held: HeldUpdate, weight: float, clip: Factors) -> Term:
    """Return an update as a term of a step. clip: the factors of its gradient and of its learning rates."""
    rates = held.rates if clip.rate == 1 else tuple(rate * clip.rate for rate in held.rates)
    return Term.of(held.gradient, weight, rates, clip.weight)
