"""Streamed updates: a shard's pieces of the model, each updated as soon as its part of an update has arrived.

The log names the updates that are applied together, their weights and their order (StreamUpdates). This holds for each
piece on its own: piece 3 of an update may be applied before piece 2 of it has arrived, and long after piece 3 of the
previous update. The store uses no socket and no thread. The caller holds a lock, except over `PieceWork.apply`:

    work = store.put(update, piece, held)       # the gradient of one piece
    while work:
        work.apply()                            # without the lock: nobody else touches this piece meanwhile
        work, whole = store.applied(work)       # what can be done next, and the updates that are complete now
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from paceline.model.combination import Term
from paceline.model.correction import Correction
from paceline.model.slice import Slice
from paceline.serve.shard.store import Fenced, HeldUpdate, Store, step_correction
from paceline.serve.wire.messages import Identity, StreamUpdates


@dataclass
class _Entry:
    """A StreamUpdates order of the log that is not yet applied to all pieces."""

    order: StreamUpdates
    weights: dict[Identity, float]  # of its updates that were not dropped
    done: int = 0  # pieces that it was applied to, or that skipped it


@dataclass
class _Piece:
    """A piece of the model, and the updates that have arrived for it."""

    slice: Slice
    next_number: int = 1  # of the StreamUpdates order that comes next here
    busy: bool = False  # is an update being applied to it?
    held: dict[Identity, HeldUpdate] = field(default_factory=dict)
    unordered: deque[_Entry] = field(default_factory=deque)  # entries without an order, whose updates are all here
    # worker → its newest (incarnation, iteration) that was applied, or is being applied
    newest: dict[int, tuple[int, int]] = field(default_factory=dict)
    steps: int = 0  # that were made, or are being made
    # worker → the steps that this piece will have made when the worker's next update comes, as the policy expects
    expected_steps: dict[int, int] = field(default_factory=dict)


class PieceWork(NamedTuple):  # one for each piece of each update, and a frozen dataclass takes twice as long to make
    """A step of one piece, by updates that have all arrived."""

    piece: int
    slice: Slice
    entry: _Entry
    updates: tuple[Identity, ...]
    gradients: tuple[torch.Tensor, ...]
    weights: tuple[float, ...]
    rates: tuple[tuple[float, ...], ...]  # of each update, by parameter group
    correct: Correction
    steps: int  # over which the copy is predicted
    copy: torch.Tensor  # receives the piece after the step, as predicted for `steps` steps later

    def apply(self) -> None:
        """Make the step, and fill the copy."""
        turns = self.entry.order.turns
        terms = [Term.of(*each) for each in zip(self.gradients, self.weights, self.rates, strict=True)]
        self.slice.step_by(terms, step_correction(self.correct, turns), turns)
        self.slice.ahead(self.steps, self.correct, self.copy)


class StreamedStore(Store):
    """The pieces of one shard."""

    def __init__(self, slices: Sequence[Slice], correct: Correction = "none") -> None:
        super().__init__(slices, correct)
        self._pieces = [_Piece(part) for part in slices]
        self._entries: dict[int, _Entry] = {}  # number → an entry that is applied in order
        self._entry_of: dict[Identity, _Entry] = {}
        self._issued = 0  # the number of the newest StreamUpdates order
        self._applied_pieces: dict[Identity, int] = {}  # update → how many pieces of it are applied
        self._dropped: dict[int, tuple[int, int]] = {}  # worker → its newest (incarnation, iteration) that was dropped

    @property
    def is_quiet(self) -> bool:
        """Whether no update is being applied."""
        return not any(piece.busy for piece in self._pieces)

    def is_busy(self, piece: int) -> bool:
        """Return whether an update is being applied to this piece."""
        return self._pieces[piece].busy

    def is_settled(self, update: Identity, piece: int) -> bool:
        """Return whether this piece of an update was applied or dropped. Its worker is then sent the piece as it is.

        A piece that is being applied counts as applied. If it is sent again meanwhile, it is not applied again.
        """
        return _key(update) <= self._pieces[piece].newest.get(update.worker, (0, 0)) or self._is_dropped(update)

    def copy(self, number: int, steps: int = 0) -> torch.Tensor:
        """Return a copy of a piece as predicted for `steps` steps later. No update may be being applied to it."""
        return self.slices[number].ahead(steps, self.correct)

    def copy_for(self, update: Identity, number: int) -> torch.Tensor:
        """Return a copy of a piece for a worker that has pushed to it before.

        It is the piece as it is now, predicted for the step at which the worker's next update is expected.
        """
        piece = self._pieces[number]
        return self.copy(number, self.steps_ahead(piece.expected_steps.get(update.worker), piece.steps))

    def fence(self, worker: int, incarnation: int) -> None:
        """Accept nothing from this worker that is older than this incarnation.

        Discard what an older incarnation has sent if the log has not named it, because it never will. An update that
        the log has named is dropped by the log too.
        """
        super().fence(worker, incarnation)
        for number, piece in enumerate(self._pieces):
            for update in [each for each in piece.held if each.worker == worker and each not in self._entry_of]:
                if update.incarnation < incarnation:
                    self.return_buffer(number, piece.held.pop(update).gradient)

    def is_held(self, update: Identity) -> bool:
        """Return whether all pieces of an update are here, and some of them wait for other updates of its order.

        Return False if the order does not ask for it.
        """
        entry = self._entry_of.get(update)
        if entry is None or not entry.order.report_held or len(entry.weights) < 2:
            return False
        waits = False
        for piece in reversed(self._pieces):  # the last one is usually pushed last
            if update in piece.held:
                waits = True
            elif piece.newest.get(update.worker, (0, 0)) < _key(update):
                return False
        return waits

    def put(self, update: Identity, number: int, held: HeldUpdate) -> PieceWork | None:
        """Hold a piece of an update that is not settled. Return the step that this piece can make now, if any."""
        if not self.accepts(update.worker, update.incarnation):
            self.return_buffer(number, held.gradient)
            raise Fenced
        piece = self._pieces[number]
        # The worker has sent this piece before, or has given up an older update.
        for old in [each for each in piece.held if each.worker == update.worker]:
            self.return_buffer(number, piece.held.pop(old).gradient)
        piece.held[update] = held
        entry = self._entry_of.get(update)
        if entry and not entry.order.in_order:
            self._queue_if_complete(piece, entry)
        return self._next(number)

    def order(self, stream: StreamUpdates) -> list[PieceWork]:
        """Take the next order of the log. Return the steps that can be made now.

        Updates that were dropped before are left out, because their pieces would never arrive.
        """
        named = zip(stream.updates, stream.weights, strict=True)
        entry = _Entry(stream, {update: weight for update, weight in named if not self._is_dropped(update)})
        self._issued = stream.number
        for update in entry.weights:
            self._entry_of[update] = entry
        if stream.in_order:
            self._entries[stream.number] = entry
        else:
            for piece in self._pieces:
                self._queue_if_complete(piece, entry)
        return self._all_next()

    def drop(self, update: Identity) -> tuple[list[PieceWork], list[int]]:
        """Drop all pieces of an update that are not applied yet.

        Return the steps that can be made now, and the pieces of the update that were held.
        """
        self._dropped[update.worker] = max(_key(update), self._dropped.get(update.worker, (0, 0)))
        self._applied_pieces.pop(update, None)
        were_held = []
        for number, piece in enumerate(self._pieces):
            if update in piece.held:
                self.return_buffer(number, piece.held.pop(update).gradient)
                were_held.append(number)
        entry = self._entry_of.pop(update, None)
        if entry:
            entry.weights.pop(update, None)
            if not entry.order.in_order:
                for piece in self._pieces:
                    self._queue_if_complete(piece, entry)
        return self._all_next(), were_held

    def applied(self, work: PieceWork) -> tuple[PieceWork | None, list[Identity]]:
        """Take note that a step was made.

        Return the next step that this piece can make, if any, and the updates that are now applied to all pieces.
        """
        piece = self._pieces[work.piece]
        piece.busy = False
        whole = []
        for update, gradient in zip(work.updates, work.gradients, strict=True):
            self.return_buffer(work.piece, gradient)
            if not self._is_dropped(update):
                count = self._applied_pieces[update] = self._applied_pieces.get(update, 0) + 1
                if count == len(self._pieces):
                    del self._applied_pieces[update]
                    self._entry_of.pop(update, None)
                    whole.append(update)
        self._count_piece(work.entry)
        return self._next(work.piece), whole

    def _is_dropped(self, update: Identity) -> bool:
        return _key(update) <= self._dropped.get(update.worker, (0, 0))

    def _all_next(self) -> list[PieceWork]:
        return [work for number in range(len(self._pieces)) if (work := self._next(number))]

    def _queue_if_complete(self, piece: _Piece, entry: _Entry) -> None:
        """Queue an entry that is bound to no order at a piece, if all its updates have arrived there."""
        if _is_complete(entry, piece) and not any(entry is known for known in piece.unordered):
            piece.unordered.append(entry)

    def _next(self, number: int) -> PieceWork | None:
        """Return the step that a piece can make now, if any. The piece is busy then, until `applied`."""
        piece = self._pieces[number]
        if piece.busy:
            return None
        entry = None
        while piece.unordered and entry is None:
            first = piece.unordered.popleft()
            entry = first if _is_complete(first, piece) else None  # its updates may have been dropped meanwhile
        entry = entry or self._next_in_order(piece)
        if entry is None:
            return None
        updates = tuple(entry.weights)
        held = [piece.held.pop(update) for update in updates]
        steps = self.steps_ahead(entry.order.expected)
        piece.steps += 1
        for update in updates:
            piece.newest[update.worker] = _key(update)
            piece.expected_steps[update.worker] = piece.steps + steps
        piece.busy = True
        return PieceWork(
            number,
            piece.slice,
            entry,
            updates,
            tuple(each.gradient for each in held),
            tuple(entry.weights.values()),
            tuple(each.rates for each in held),
            self.correct,
            steps,
            self.take_buffer(number),
        )

    def _next_in_order(self, piece: _Piece) -> _Entry | None:
        """Return the entry whose turn it is at a piece, if all its updates have arrived there."""
        while piece.next_number <= self._issued:
            entry = self._entries.get(piece.next_number)  # None if that order is applied out of order
            if entry is not None and entry.weights:
                if not _is_complete(entry, piece):
                    return None
                piece.next_number += 1
                return entry
            if entry is not None:
                self._count_piece(entry)  # all its updates were dropped
            piece.next_number += 1
        return None

    def _count_piece(self, entry: _Entry) -> None:
        """Count one more piece that is done with an entry, and forget the entry after the last one."""
        entry.done += 1
        if entry.done == len(self._pieces):
            self._entries.pop(entry.order.number, None)


def _key(update: Identity) -> tuple[int, int]:
    """Return the key that sorts the updates of one worker by age."""
    return update.incarnation, update.iteration


def _is_complete(entry: _Entry, piece: _Piece) -> bool:
    """Return whether all updates of an entry have arrived at a piece. An entry without updates is never complete."""
    return bool(entry.weights) and entry.weights.keys() <= piece.held.keys()
