"""Streamed: a shard's pieces of the model, each moved by an update's piece as soon as that is in.

The log says which updates are applied together, by which weights and in which order (`Stream`). That holds for every
piece by itself: piece 3 of an update may be applied before piece 2 of it has come, and long after piece 3 of the update
before. It knows no socket and no thread: whoever calls holds a lock, except over `apply`.

    work = streams.put(update, piece, held)     # the gradient of one piece
    while work:
        work.apply()                            # without the lock: nobody else touches this piece meanwhile
        work, answers = streams.applied(work)   # to whom the piece goes back, and what can be done next
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.model.correction import Correction
from paceline.model.slice import Slice
from paceline.serve.shard.store import Fenced, HeldUpdate, Store, in_step
from paceline.serve.wire.messages import Identity, StreamUpdates


@dataclass
class _Entry:
    """One Stream of the log, as far as it is not done."""

    order: StreamUpdates
    weights: dict[Identity, float]  # of those that are in it still
    done: int = 0  # pieces


@dataclass
class _Piece:
    """A piece of the model, and what there is for it."""

    slice: Slice
    at: int = 1  # the number of the Stream that comes next
    busy: bool = False  # is it being applied to?
    held: dict[Identity, HeldUpdate] = field(default_factory=dict)
    loose: deque[_Entry] = field(default_factory=deque)  # complete, and bound to no order
    # worker → the last (incarnation, iteration) of it that was applied, or is being applied
    newest: dict[int, tuple[int, int]] = field(default_factory=dict)
    moves: int = 0  # how often it has been moved, or is being moved
    due: dict[int, int] = field(default_factory=dict)  # worker → the moves before its next one, where that is known


@dataclass(frozen=True)
class PieceWork:
    """A piece to be moved by updates whose pieces are all in."""

    piece: int
    slice: Slice
    entry: _Entry
    updates: tuple[Identity, ...]
    gradients: tuple[torch.Tensor, ...]
    weights: tuple[float, ...]
    rates: tuple[float, ...]
    correct: Correction  # how staleness is taken into account
    steps: int  # by which the copy is ahead
    copy: torch.Tensor  # of the piece as it is then, or will be

    def apply(self) -> None:
        """Move it."""
        turns = self.entry.order.turns
        self.slice.step(self.gradients, self.weights, self.rates, in_step(self.correct, turns), turns)
        self.slice.ahead(self.steps, self.correct, self.copy)


class StreamedStore(Store):
    """The pieces of one shard."""

    def __init__(self, slices: Sequence[Slice], correct: Correction = "none") -> None:
        super().__init__(slices, correct)
        self._pieces = [_Piece(part) for part in slices]
        self._entries: dict[int, _Entry] = {}
        self._entry_of: dict[Identity, _Entry] = {}
        self._issued = 0  # the number of the newest Stream
        self._whole: dict[Identity, int] = {}  # update → pieces of it that are applied
        self._gone: dict[int, tuple[int, int]] = {}  # worker → the newest (incarnation, iteration) that was dropped

    @property
    def is_quiet(self) -> bool:
        """Is nothing being applied?"""
        return not any(piece.busy for piece in self._pieces)

    def is_busy(self, piece: int) -> bool:
        return self._pieces[piece].busy

    def is_over(self, update: Identity, piece: int) -> bool:
        """Was this piece applied already, or will it never be? Then its worker is answered with what there is.

        One that is being applied counts too: sent again just then, it must not be applied again.
        """
        return _key(update) <= self._pieces[piece].newest.get(update.worker, (0, 0)) or self._is_gone(update)

    def copy(self, number: int, steps: int = 0) -> torch.Tensor:
        """A copy of a piece as it is, or as it will be so many steps later. Nobody may be moving it."""
        return self.slices[number].ahead(steps, self.correct)

    def copy_for(self, update: Identity, number: int) -> torch.Tensor:
        """A copy for one who has pushed to this piece before, as it was to be returned then, and of what it is now."""
        piece = self._pieces[number]
        return self.copy(number, self.steps_ahead(piece.due.get(update.worker), piece.moves))

    def fence(self, worker: int, incarnation: int) -> None:
        """What an older one has sent and the log has not named, it never will. What it has named is dropped by it."""
        super().fence(worker, incarnation)
        for number, piece in enumerate(self._pieces):
            for update in [each for each in piece.held if each.worker == worker and each not in self._entry_of]:
                if update.incarnation < incarnation:
                    self.free(number, piece.held.pop(update).gradient)

    def put(self, update: Identity, number: int, held: HeldUpdate) -> PieceWork | None:
        """A piece of an update is in; what can be done then. It must not be over."""
        if not self.accepts(update.worker, update.incarnation):
            self.free(number, held.gradient)
            raise Fenced("This worker has been given up; it must join again.")
        piece = self._pieces[number]
        for old in [each for each in piece.held if each.worker == update.worker]:  # itself, sent again, or forgotten
            self.free(number, piece.held.pop(old).gradient)
        piece.held[update] = held
        entry = self._entry_of.get(update)
        if entry and not entry.order.in_order:
            self._if_complete(piece, entry)
        return self._next(number)

    def order(self, stream: StreamUpdates) -> list[PieceWork]:
        """The log goes on; what can be done then. What was dropped before is left out: it would be waited for."""
        named = zip(stream.updates, stream.weights, strict=True)
        entry = _Entry(stream, {update: weight for update, weight in named if not self._is_gone(update)})
        self._issued = stream.number
        for update in entry.weights:
            self._entry_of[update] = entry
        if stream.in_order:
            self._entries[stream.number] = entry
        else:
            for piece in self._pieces:
                self._if_complete(piece, entry)
        return self._all_next()

    def drop(self, update: Identity) -> tuple[list[PieceWork], list[int]]:
        """What is not applied of an update never will be. What can be done then, and which of its pieces were here."""
        self._gone[update.worker] = max(_key(update), self._gone.get(update.worker, (0, 0)))
        self._whole.pop(update, None)
        here = []
        for number, piece in enumerate(self._pieces):
            if update in piece.held:
                self.free(number, piece.held.pop(update).gradient)
                here.append(number)
        entry = self._entry_of.pop(update, None)
        if entry:
            entry.weights.pop(update, None)
            if not entry.order.in_order:
                for piece in self._pieces:
                    self._if_complete(piece, entry)
        return self._all_next(), here

    def applied(self, work: PieceWork) -> tuple[PieceWork | None, list[Identity]]:
        """What was to be done is done. What can be done next to that piece, and which updates are in whole now."""
        piece = self._pieces[work.piece]
        piece.busy = False
        whole = []
        for update, gradient in zip(work.updates, work.gradients, strict=True):
            self.free(work.piece, gradient)
            if not self._is_gone(update):
                count = self._whole[update] = self._whole.get(update, 0) + 1
                if count == len(self._pieces):
                    del self._whole[update]
                    self._entry_of.pop(update, None)
                    whole.append(update)
        self._pass(work.entry)
        return self._next(work.piece), whole

    def _is_gone(self, update: Identity) -> bool:
        return _key(update) <= self._gone.get(update.worker, (0, 0))

    def _all_next(self) -> list[PieceWork]:
        return [work for number in range(len(self._pieces)) if (work := self._next(number))]

    def _if_complete(self, piece: _Piece, entry: _Entry) -> None:
        """An entry that is bound to no order can be applied to a piece as soon as all have sent it."""
        if _is_complete(entry, piece) and not any(entry is known for known in piece.loose):
            piece.loose.append(entry)

    def _next(self, number: int) -> PieceWork | None:
        """What can be applied to a piece now. It is busy then, until `applied`."""
        piece = self._pieces[number]
        if piece.busy:
            return None
        entry = None
        while piece.loose and entry is None:
            first = piece.loose.popleft()
            entry = first if _is_complete(first, piece) else None  # it may have been dropped meanwhile
        entry = entry or self._in_line(piece)
        if entry is None:
            return None
        updates = tuple(entry.weights)
        held = [piece.held.pop(update) for update in updates]
        steps = self.steps_ahead(entry.order.expected)
        piece.moves += 1
        for update in updates:
            piece.newest[update.worker] = _key(update)
            piece.due[update.worker] = piece.moves + steps
        piece.busy = True
        return PieceWork(
            number,
            piece.slice,
            entry,
            updates,
            tuple(each.gradient for each in held),
            tuple(entry.weights.values()),
            held[-1].rates,
            self.correct,
            steps,
            self.room(number),
        )

    def _in_line(self, piece: _Piece) -> _Entry | None:
        """The entry whose turn it is at a piece, if all of it is there."""
        while piece.at <= self._issued:
            entry = self._entries.get(piece.at)  # none, if it is bound to no order
            if entry is not None and entry.weights:
                if not _is_complete(entry, piece):
                    return None
                piece.at += 1
                return entry
            if entry is not None:
                self._pass(entry)  # all of them are gone
            piece.at += 1
        return None

    def _pass(self, entry: _Entry) -> None:
        """One more piece is done with an entry."""
        entry.done += 1
        if entry.done == len(self._pieces):
            self._entries.pop(entry.order.number, None)


def _key(update: Identity) -> tuple[int, int]:
    """By which the updates of one worker follow one another."""
    return update.incarnation, update.iteration


def _is_complete(entry: _Entry, piece: _Piece) -> bool:
    """Is there an update in it still, and have all of them sent this piece?"""
    return bool(entry.weights) and entry.weights.keys() <= piece.held.keys()
