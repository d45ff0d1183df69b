"""A shard without tensors: it counts how often each sample has changed each of its pieces of the model.

It keeps the promises of a real shard: an update is applied once, in the order of the log, and an update of a fenced
incarnation is refused. Streamed updates are applied piece by piece: a piece of a Stream is applied when all of the
Stream's updates have sent it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.job import Identity, instructions
from paceline.job.identity import identity_of

Answer = Callable[[str], None]  # answers the worker with "pushed", "returned" or "expelled"


@dataclass
class StreamProgress:
    """A Stream of the log that is not complete."""

    updates: set[Identity]
    in_order: bool
    left: int  # pieces that have not applied it
    report_held: bool


@dataclass
class SimulatedPiece:
    """One piece of the model."""

    counts: dict[int, int] = field(default_factory=dict)  # sample → how often it has changed this piece
    held: dict[Identity, tuple[tuple[int, ...], Answer]] = field(default_factory=dict)
    next: int = 0  # index of the next entry to apply
    loose: list[StreamProgress] = field(default_factory=list)  # entries that are not bound to the order
    newest: dict[int, tuple[int, int]] = field(default_factory=dict)  # worker → its last applied update
    last: dict[int, tuple[int, ...]] = field(default_factory=dict)  # worker → the samples of that update

    def apply(self, samples: tuple[int, ...]) -> None:
        for sample in samples:
            self.counts[sample] = self.counts.get(sample, 0) + 1

    def take_back(self, update: Identity) -> None:
        """Take back the samples of an update that will never be complete, if this piece has applied it."""
        if self.newest.get(update.worker) == _key(update):
            for sample in self.last.pop(update.worker, ()):
                self.counts[sample] -= 1


class SimulatedShard:
    """A shard in one generation."""

    def __init__(
        self, number: int, pieces: int, tell: Callable[[str, Any], None], counts: list[dict[int, int]]
    ) -> None:
        """tell(kind, what): sends a message to the coordinator.

        counts: the counts of each piece, from a checkpoint; or empty.
        """
        self.number, self._tell = number, tell
        self.pieces = [SimulatedPiece(dict(counts[piece]) if counts else {}) for piece in range(pieces)]
        self.version = 0
        self.streams = False
        self.order: list[int] = []  # applied versions, in order of application
        self._fence: dict[int, int] = {}
        self._newest: dict[int, tuple[int, int]] = {}  # worker → its newest update that has arrived
        self._waiting: dict[Identity, tuple[int, ...]] = {}
        self._kept: dict[int, tuple[Identity, tuple[int, ...]]] = {}
        self._pulls: list[tuple[int, Answer]] = []
        self._entries: list[StreamProgress] = []
        self._entry_of: dict[Identity, StreamProgress] = {}
        self._pieces_in: dict[Identity, int] = {}
        self._gone: dict[int, tuple[int, int]] = {}  # worker → its newest dropped update

    def accepts(self, update: Identity) -> bool:
        return update.incarnation >= self._fence.get(update.worker, 0)

    def pull(self, version: int, answer: Answer) -> None:
        """Answer a pull once there is this version.

        If updates are streamed, a piece has everything that was ordered before, so the answer is immediate.
        """
        if self.streams:
            answer("weights")
            return
        self._pulls.append((version, answer))
        self._answer_pulls()

    def _answer_pulls(self) -> None:
        ready = [answer for version, answer in self._pulls if version <= self.version]
        self._pulls = [pull for pull in self._pulls if pull[0] > self.version]
        for answer in ready:
            answer("weights")

    # Whole updates

    def push(self, update: Identity, samples: tuple[int, ...], answer: Answer) -> None:
        """Take a whole update. An update that is sent twice counts once."""
        if not self.accepts(update):
            answer("expelled")
            return
        if _key(update) > self._newest.get(update.worker, (0, 0)):
            self._newest[update.worker] = _key(update)
            self._waiting[update] = samples
            self._tell("arrived", update)
        answer("pushed")

    def carry_out(self, order: Any) -> None:
        """Carry out an order of the coordinator."""
        match order:
            case instructions.OrderApply(version, decision):
                self.order.append(version)
                kept = dict(self._kept.values())
                for update in map(identity_of, decision.updates):
                    samples = kept[update] if update in kept else self._waiting.pop(update)
                    for piece in self.pieces:
                        piece.apply(samples)
                self.version = version
                self._answer_pulls()
            case instructions.OrderDiscard(decision):
                self._drop(identity_of(decision.update))
            case instructions.OrderDrop(update):
                self._drop(update)
            case instructions.OrderKeep(decision):
                update = identity_of(decision.update)
                self._kept[decision.slot] = (update, self._waiting.pop(update))
            case instructions.OrderFence(worker, incarnation):
                self._fence[worker] = max(incarnation, self._fence.get(worker, 0))
                for piece in self.pieces:
                    named = [each for each in piece.held if each.worker == worker and each not in self._entry_of]
                    for update in named:
                        if not self.accepts(update):
                            del piece.held[update]
            case instructions.OrderStream():
                self._stream(order)
            case instructions.OrderSave(version):
                self._tell("saved", (version, [dict(piece.counts) for piece in self.pieces]))

    def _drop(self, update: Identity) -> None:
        self._waiting.pop(update, None)
        self._gone[update.worker] = max(_key(update), self._gone.get(update.worker, (0, 0)))
        self._pieces_in.pop(update, None)
        for piece in self.pieces:
            piece.take_back(update)
            if update in piece.held:
                piece.held.pop(update)[1]("returned")
        entry = self._entry_of.pop(update, None)
        if entry:
            entry.updates.discard(update)
            self._apply_streamed()

    # Streamed updates

    def push_piece(self, update: Identity, number: int, samples: tuple[int, ...], answer: Answer) -> None:
        """Take a piece of an update. Answer once it is applied, or never will be."""
        piece = self.pieces[number]
        if not self.accepts(update):
            answer("expelled")
        elif _key(update) <= max(piece.newest.get(update.worker, (0, 0)), self._gone.get(update.worker, (0, 0))):
            answer("returned")
        else:
            for old in [each for each in piece.held if each.worker == update.worker]:
                del piece.held[old]
            piece.held[update] = (samples, answer)
            self._apply_streamed()
            self._tell_if_held(update)

    def _tell_if_held(self, update: Identity) -> None:
        """Tell the coordinator if all pieces of an update are here, and some of them wait for other updates."""
        entry = self._entry_of.get(update)
        if entry is None or not entry.report_held or len(entry.updates) < 2:
            return
        if all(update in piece.held or piece.newest.get(update.worker) == _key(update) for piece in self.pieces):
            self._tell("held", update)

    def _stream(self, stream: instructions.OrderStream) -> None:
        known = {update for update in stream.updates if _key(update) > self._gone.get(update.worker, (0, 0))}
        entry = StreamProgress(known, stream.in_order, len(self.pieces), stream.report_held)
        if stream.in_order:
            self._entries.append(entry)
        else:
            for piece in self.pieces:
                piece.loose.append(entry)
        for update in known:
            self._entry_of[update] = entry
        self._apply_streamed()
        for update in known:
            self._tell_if_held(update)

    def _apply_streamed(self) -> None:
        for piece in self.pieces:
            for entry in list(piece.loose):
                if entry.updates <= piece.held.keys():
                    piece.loose.remove(entry)
                    self._apply_entry(piece, entry)
            while piece.next < len(self._entries) and self._entries[piece.next].updates <= piece.held.keys():
                piece.next += 1
                self._apply_entry(piece, self._entries[piece.next - 1])

    def _apply_entry(self, piece: SimulatedPiece, entry: StreamProgress) -> None:
        for update in sorted(entry.updates):
            samples, answer = piece.held.pop(update)
            piece.apply(samples)
            piece.newest[update.worker], piece.last[update.worker] = _key(update), samples
            answer("returned")
            self._pieces_in[update] = self._pieces_in.get(update, 0) + 1
            if self._pieces_in[update] == len(self.pieces):
                del self._pieces_in[update]
                self._entry_of.pop(update, None)
                self._tell("arrived", update)


def _key(update: Identity) -> tuple[int, int]:
    return update.incarnation, update.iteration
