"""Streamed pieces on one shard, whatever comes in whatever order: once each, in the log's order, and nobody waits.

`Play` is the coordinator, the workers and the shard's threads in one. Each worker has one update under way, as the
server allows it; its pieces come in any order, some twice, before or after the log names them, and while a piece is
being moved anything else may happen.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from paceline.model.correction import CORRECTIONS, Correction
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.model.slice import Slice
from paceline.serve.shard.store import Fenced, HeldUpdate
from paceline.serve.shard.streamed_store import PieceWork, StreamedStore
from paceline.serve.wire.messages import Identity, StreamUpdates

EXAMPLES = int(os.environ.get("PACELINE_EXAMPLES", "0"))
SETTINGS = settings(
    max_examples=EXAMPLES or 150,
    deadline=None,
    derandomize=not EXAMPLES,
    database=None,
    suppress_health_check=list(HealthCheck),
)
WORKERS, EACH = 4, 3  # elements of a piece
#: With momentum it matters in which order updates are applied.
SPEC = OptimizerSpec("SGD", ({"lr": 1.0, "momentum": 0.5},))


def slices(pieces: int) -> list[Slice]:
    layout = Layout((Tensor("w", (pieces * EACH,)),))
    return [Slice(layout, number * EACH, (number + 1) * EACH, SPEC) for number in range(pieces)]


def gradient(update: Identity, piece: int) -> Any:
    """Another one for every update and piece."""
    first = 100 * update.worker + 10 * update.incarnation + update.iteration + piece / 8
    return torch.arange(EACH, dtype=torch.float32) + first


@dataclass
class Sent:
    """An update under way, as its worker and the coordinator see it."""

    update: Identity
    order: StreamUpdates | None = None
    pieces: set[int] = field(default_factory=set)
    back: set[int] = field(default_factory=set)
    dropped: bool = False


class Play:
    """Everybody but the Streams."""

    def __init__(self, pieces: int, correct: Correction = "none") -> None:
        self.pieces, self.correct = pieces, correct
        self.streams = StreamedStore(slices(pieces), correct)
        self.incarnation = dict.fromkeys(range(WORKERS), 1)
        self.iteration = dict.fromkeys(range(WORKERS), 1)
        self.sent = {worker: Sent(Identity(worker, 1, 1)) for worker in range(WORKERS)}
        self.all: dict[Identity, Sent] = {sent.update: sent for sent in self.sent.values()}
        self.issued = 0
        self.works: dict[int, PieceWork] = {}  # being moved, by the piece
        self.moved: list[list[PieceWork]] = [[] for _ in range(pieces)]
        self.whole = Counter[Identity]()

    def take(self, works: list[PieceWork]) -> None:
        """What may be done now; it must be right to do it."""
        for work in works:
            assert work.piece not in self.works, "two at once at one piece"
            self.works[work.piece] = work
            order = work.entry.order
            named = dict(zip(order.updates, order.weights, strict=True))
            assert list(work.updates) == [update for update in order.updates if update in work.updates]
            for update, its, weight in zip(work.updates, work.gradients, work.weights, strict=True):
                assert torch.equal(its, gradient(update, work.piece)), "it is another update's, or was overwritten"
                assert weight == named[update]
                assert not self.all[update].dropped, "it was dropped before"
            missing = [update for update in order.updates if update not in work.updates]
            assert all(self.all[update].dropped for update in missing), "somebody was left out"

    def apply(self, piece: int) -> None:
        """A piece has been moved."""
        work = self.works.pop(piece, None)
        if work is None:
            return
        work.apply()
        self.moved[piece].append(work)
        following, whole = self.streams.applied(work)
        for update in work.updates:
            self.all[update].back.add(piece)
        self.whole.update(whole)
        self.take([following] if following else [])

    def put(self, worker: int, piece: int) -> None:
        """As a shard does: what is over is answered at once."""
        sent = self.sent[worker]
        if self.streams.is_over(sent.update, piece):
            sent.pieces.add(piece)
            sent.back.add(piece)
            return
        buffer = self.streams.room(piece)
        buffer.copy_(gradient(sent.update, piece))
        work = self.streams.put(sent.update, piece, HeldUpdate(buffer, (1.0,)))
        sent.pieces.add(piece)
        self.take([work] if work else [])

    def order(self, workers: list[int], in_order: bool) -> None:
        """The log names those who are not named yet."""
        fresh = [self.sent[worker] for worker in dict.fromkeys(workers) if self.sent[worker].order is None]
        if not fresh:
            return
        self.issued += 1
        weights = tuple(0.5 + sent.update.worker for sent in fresh)
        # Some are alone in their round, some know how stale they will be, and some do not.
        turns, expected = 1 + self.issued % 3, (None, 0, 1, 5)[self.issued % 4]
        stream = StreamUpdates(self.issued, tuple(sent.update for sent in fresh), weights, in_order, turns, expected)
        for sent in fresh:
            sent.order = stream
        self.take(self.streams.order(stream))

    def drop(self, worker: int) -> None:
        sent = self.sent[worker]
        sent.dropped = True
        works, here = self.streams.drop(sent.update)
        assert set(here) <= sent.pieces
        sent.back |= set(here)
        self.take(works)

    def go_on(self, worker: int) -> None:
        """The next update, when all of this one is back."""
        sent = self.sent[worker]
        if sent.order is None and not sent.dropped:
            return
        if len(sent.back) == self.pieces:
            self.iteration[worker] += 1
            self._begin(worker)

    def give_up(self, worker: int) -> None:
        """It joins again as another; its old self is heard no more."""
        old = self.sent[worker].update
        self.incarnation[worker] += 1
        self.iteration[worker] = 1
        self.streams.fence(worker, self.incarnation[worker])
        self.drop(worker)
        with pytest.raises(Fenced):
            self.streams.put(old, 0, HeldUpdate(self.streams.room(0), (1.0,)))
        self._begin(worker)

    def _begin(self, worker: int) -> None:
        update = Identity(worker, self.incarnation[worker], self.iteration[worker])
        self.sent[worker] = self.all[update] = Sent(update)

    def finish(self) -> None:
        """Everybody sends what is missing, and all that can be moved is."""
        self.order(list(range(WORKERS)), in_order=True)
        for worker in range(WORKERS):
            for piece in range(self.pieces):
                if piece not in self.sent[worker].back:
                    self.put(worker, piece)
        while self.works:
            self.apply(min(self.works))

    def judge(self) -> None:
        for worker, sent in self.sent.items():
            assert len(sent.back) == self.pieces, f"worker {worker} waits for ever"
        assert self.streams.is_quiet
        reference = slices(self.pieces)
        for piece, works in enumerate(self.moved):
            times = Counter(update for work in works for update in work.updates)
            assert all(count == 1 for count in times.values()), "applied twice"
            numbers = [work.entry.order.number for work in works if work.entry.order.in_order]
            assert numbers == sorted(numbers), "not in the log's order"
            named = [sent.update for sent in self.all.values() if sent.order and not sent.dropped]
            assert set(named) <= times.keys(), "an update was lost"
            for work in works:
                gradients, turns = [gradient(update, piece) for update in work.updates], work.entry.order.turns
                correct: Correction = self.correct if turns > 1 else "none"
                reference[piece].step(gradients, work.weights, (1.0,), correct, turns)
                due = reference[piece].ahead(work.entry.order.expected or 0, self.correct)
                assert torch.equal(work.copy, due), "what comes back is not what it will be"
            assert torch.equal(self.streams.slices[piece].weights, reference[piece].weights)
        for update, sent in self.all.items():
            assert self.whole[update] == 1 or (sent.dropped and self.whole[update] <= 1)
        assert not self.streams._entries and not self.streams._entry_of and not self.streams._whole, "something is kept"
        assert all(not piece.held and not piece.loose for piece in self.streams._pieces), "a buffer is kept"


ACTIONS = st.one_of(
    st.tuples(st.just("put"), st.integers(0, WORKERS - 1), st.integers(0, 3)),
    st.tuples(st.just("put"), st.integers(0, WORKERS - 1), st.integers(0, 3)),
    st.tuples(st.just("apply"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("order"), st.lists(st.integers(0, WORKERS - 1), min_size=1, max_size=WORKERS), st.booleans()),
    st.tuples(st.just("go on"), st.integers(0, WORKERS - 1), st.just(0)),
    st.tuples(st.just("drop"), st.integers(0, WORKERS - 1), st.just(0)),
    st.tuples(st.just("give up"), st.integers(0, WORKERS - 1), st.just(0)),
)


@pytest.mark.parametrize("orders", ["in order", "as they come", "both"])
@SETTINGS
@given(pieces=st.integers(1, 4), correct=st.sampled_from(CORRECTIONS), actions=st.lists(ACTIONS, max_size=80))
def test_every_piece_once_in_the_logs_order_and_nobody_waits(
    orders: str, pieces: int, correct: Correction, actions: list[object]
) -> None:
    """And what comes back is the piece as it is after that, or as it will be so many steps later."""
    play = Play(pieces, correct)
    for action in actions:
        match action:
            case ("put", int(worker), int(piece)):
                play.put(worker, piece % pieces)
            case ("apply", int(piece), _):
                play.apply(piece % pieces)
            case ("order", list(workers), bool(in_order)):
                play.order(workers, {"in order": True, "as they come": False}.get(orders, in_order))
            case ("go on", int(worker), _):
                play.go_on(worker)
            case ("drop", int(worker), _):
                play.drop(worker)
            case ("give up", int(worker), _):
                play.give_up(worker)
    play.finish()
    play.judge()


def test_a_piece_sent_again_while_it_is_being_applied_is_not_applied_again() -> None:
    """Its connection was lost just then, and it comes over a new one."""
    play = Play(1)
    play.order([0], in_order=False)
    play.put(0, 0)
    assert play.works
    play.put(0, 0)
    play.apply(0)
    assert not play.works
    assert len(play.moved[0]) == 1


def test_pieces_of_a_later_update_overtake_at_other_pieces_only() -> None:
    play = Play(2)
    play.order([0], in_order=True)
    play.order([1], in_order=True)
    play.put(1, 0)
    play.put(1, 1)
    assert not play.works, "worker 0 comes first at both"
    play.put(0, 1)
    play.apply(1)
    assert [work.updates[0].worker for work in (*play.moved[1], play.works[1])] == [0, 1]
    assert 0 not in play.works, "at piece 0, worker 0 is still waited for"


def test_who_is_cancelled_before_the_log_names_it_is_not_waited_for() -> None:
    """The log's entry was put off until a checkpoint was made, and the push was cancelled meanwhile."""
    play = Play(1)
    play.drop(0)
    play.order([0, 1], in_order=True)
    play.put(1, 0)
    assert [update.worker for update in play.works[0].updates] == [1]


def test_what_was_sent_before_the_log_named_it_goes_with_its_worker() -> None:
    play = Play(2)
    play.put(0, 1)
    play.streams.fence(0, 2)
    assert not any(piece.held for piece in play.streams._pieces)


def test_what_was_applied_before_its_worker_died_stays() -> None:
    play = Play(2)
    play.order([0], in_order=True)
    play.put(0, 1)
    play.apply(1)
    play.put(0, 0)
    play.drop(0)
    play.apply(0)
    assert [len(works) for works in play.moved] == [1, 1], "piece 0 was under way, and is not torn"
    assert play.whole[Identity(0, 1, 1)] == 0, "but the update is not in whole"


def test_a_piece_sent_again_comes_back_as_it_would_have_and_of_what_it_is_now() -> None:
    """Its answer was lost. Others have moved it since, so fewer steps are left until its worker's next update."""
    play = Play(1, "full")

    def moves(worker: int, expected: int | None) -> Identity:
        update = play.sent[worker].update
        play.issued += 1
        play.take(play.streams.order(StreamUpdates(play.issued, (update,), (1.0,), True, WORKERS, expected)))
        play.put(worker, 0)
        play.apply(0)
        return update

    (part,) = play.streams.slices
    mine = moves(0, expected=3)
    assert torch.equal(play.streams.copy_for(mine, 0), part.ahead(3, "full"))
    for worker, left in ((1, 2), (2, 1), (3, 0)):
        other = moves(worker, expected=None)
        assert torch.equal(play.streams.copy_for(mine, 0), part.ahead(left, "full"))
        assert torch.equal(play.streams.copy_for(other, 0), part.weights), "nobody knows how stale that will be"
    assert not torch.equal(part.ahead(1, "full"), part.weights), "else nothing is shown here"
    assert torch.equal(play.streams.copy(0), part.weights)
    assert torch.equal(play.streams.copy(0, 2), part.ahead(2, "full"))
