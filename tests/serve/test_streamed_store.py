"""Streamed pieces on one shard, in any order of events: applied once, in the order of the log, and nobody waits.

`Play` stands for the coordinator, the workers and the threads of the shard. Each worker has one update under way, as
the server allows. Its pieces arrive in any order, some twice, before or after the log names the update. While an update
is being applied to a piece, anything else may happen.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given
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
from tries import tries

WORKERS, EACH = 4, 3  # elements of a piece
#: With momentum, the order of updates changes the result.
SPEC = OptimizerSpec("SGD", ({"lr": 1.0, "momentum": 0.5},))


def slices(pieces: int) -> list[Slice]:
    layout = Layout((Tensor("w", (pieces * EACH,)),))
    return [Slice(layout, number * EACH, (number + 1) * EACH, SPEC) for number in range(pieces)]


def gradient(update: Identity, piece: int) -> Any:
    """Return the gradient of an update for a piece. It is different for each."""
    first = 100 * update.worker + 10 * update.incarnation + update.iteration + piece / 8
    return torch.arange(EACH, dtype=torch.float32) + first


@dataclass
class Sent:
    """An update under way, as its worker and the coordinator see it."""

    update: Identity
    order: StreamUpdates | None = None
    pieces: set[int] = field(default_factory=set)  # that the worker has pushed
    returned: set[int] = field(default_factory=set)  # that the shard has returned
    dropped: bool = False


class Play:
    """Everything around the store. It checks each step that the store makes."""

    def __init__(self, pieces: int, correct: Correction = "none") -> None:
        self.pieces, self.correct = pieces, correct
        self.store = StreamedStore(slices(pieces), correct)
        self.incarnation = dict.fromkeys(range(WORKERS), 1)
        self.iteration = dict.fromkeys(range(WORKERS), 1)
        self.sent = {worker: Sent(Identity(worker, 1, 1)) for worker in range(WORKERS)}
        self.all: dict[Identity, Sent] = {sent.update: sent for sent in self.sent.values()}
        self.issued = 0
        self.works: dict[int, PieceWork] = {}  # piece → the step that it is making
        self.made: list[list[PieceWork]] = [[] for _ in range(pieces)]  # the steps that each piece has made
        self.whole = Counter[Identity]()

    def take(self, works: list[PieceWork]) -> None:
        """Begin the steps that the store returned, and assert that they are right."""
        for work in works:
            assert work.piece not in self.works, "a piece makes two steps at once"
            self.works[work.piece] = work
            order = work.entry.order
            named = dict(zip(order.updates, order.weights, strict=True))
            assert list(work.updates) == [update for update in order.updates if update in work.updates]
            for update, its, weight in zip(work.updates, work.gradients, work.weights, strict=True):
                assert torch.equal(its, gradient(update, work.piece)), "the gradient was overwritten"
                assert weight == named[update]
                assert not self.all[update].dropped, "a dropped update is applied"
            missing = [update for update in order.updates if update not in work.updates]
            assert all(self.all[update].dropped for update in missing), "an update was left out"

    def apply(self, piece: int) -> None:
        """End the step of a piece."""
        work = self.works.pop(piece, None)
        if work is None:
            return
        work.apply()
        self.made[piece].append(work)
        following, whole = self.store.applied(work)
        for update in work.updates:
            self.all[update].returned.add(piece)
        self.whole.update(whole)
        self.take([following] if following else [])

    def put(self, worker: int, piece: int) -> None:
        """Push a piece. As in a shard, a piece that is settled is returned at once."""
        sent = self.sent[worker]
        if self.store.is_settled(sent.update, piece):
            sent.pieces.add(piece)
            sent.returned.add(piece)
            return
        buffer = self.store.take_buffer(piece)
        buffer.copy_(gradient(sent.update, piece))
        work = self.store.put(sent.update, piece, HeldUpdate(buffer, (1.0,)))
        sent.pieces.add(piece)
        self.take([work] if work else [])
        assert self.store.is_held(sent.update) == self.waits_for_others(sent)

    def waits_for_others(self, sent: Sent) -> bool:
        """Return whether all pieces of an update are here, and one of them waits for others of its order."""
        if sent.order is None or sent.dropped or sum(not self.all[each].dropped for each in sent.order.updates) < 2:
            return False
        begun = {piece for piece, work in self.works.items() if sent.update in work.updates}
        return len(sent.pieces) == self.pieces and len(sent.returned | begun) < self.pieces

    def order(self, workers: list[int], in_order: bool) -> None:
        """Name the updates of these workers in the log, if they are not named yet."""
        fresh = [self.sent[worker] for worker in dict.fromkeys(workers) if self.sent[worker].order is None]
        if not fresh:
            return
        self.issued += 1
        weights = tuple(0.5 + sent.update.worker for sent in fresh)
        # Some updates are alone in their round. For some the staleness is expected, and for some it is unknown.
        turns, expected = 1 + self.issued % 3, (None, 0, 1, 5)[self.issued % 4]
        updates = tuple(sent.update for sent in fresh)
        stream = StreamUpdates(self.issued, updates, weights, in_order, turns, expected, report_held=True)
        for sent in fresh:
            sent.order = stream
        self.take(self.store.order(stream))

    def drop(self, worker: int) -> None:
        """Drop the worker's update."""
        sent = self.sent[worker]
        sent.dropped = True
        works, were_held = self.store.drop(sent.update)
        assert set(were_held) <= sent.pieces
        sent.returned |= set(were_held)
        self.take(works)

    def go_on(self, worker: int) -> None:
        """Begin the worker's next update, if all pieces of this one are back."""
        sent = self.sent[worker]
        if sent.order is None and not sent.dropped:
            return
        if len(sent.returned) == self.pieces:
            self.iteration[worker] += 1
            self._begin(worker)

    def give_up(self, worker: int) -> None:
        """Give up a worker, which joins again. Pushes of its old incarnation are refused."""
        old = self.sent[worker].update
        self.incarnation[worker] += 1
        self.iteration[worker] = 1
        self.store.fence(worker, self.incarnation[worker])
        self.drop(worker)
        with pytest.raises(Fenced):
            self.store.put(old, 0, HeldUpdate(self.store.take_buffer(0), (1.0,)))
        self._begin(worker)

    def _begin(self, worker: int) -> None:
        update = Identity(worker, self.incarnation[worker], self.iteration[worker])
        self.sent[worker] = self.all[update] = Sent(update)

    def finish(self) -> None:
        """Push all missing pieces, and make all steps that can be made."""
        self.order(list(range(WORKERS)), in_order=True)
        for worker in range(WORKERS):
            for piece in range(self.pieces):
                if piece not in self.sent[worker].returned:
                    self.put(worker, piece)
        while self.works:
            self.apply(min(self.works))

    def judge(self) -> None:
        """Assert that every update was applied once and in order, and that the store has forgotten all of them."""
        for worker, sent in self.sent.items():
            assert len(sent.returned) == self.pieces, f"worker {worker} waits for ever"
        assert self.store.is_quiet
        reference = slices(self.pieces)
        for piece, works in enumerate(self.made):
            times = Counter(update for work in works for update in work.updates)
            assert all(count == 1 for count in times.values()), "an update was applied twice"
            numbers = [work.entry.order.number for work in works if work.entry.order.in_order]
            assert numbers == sorted(numbers), "the order of the log was broken"
            named = [sent.update for sent in self.all.values() if sent.order and not sent.dropped]
            assert set(named) <= times.keys(), "an update was lost"
            for work in works:
                gradients, turns = [gradient(update, piece) for update in work.updates], work.entry.order.turns
                correct: Correction = self.correct if turns > 1 else "none"
                reference[piece].step(gradients, work.weights, (1.0,), correct, turns)
                due = reference[piece].ahead(work.entry.order.expected or 0, self.correct)
                assert torch.equal(work.copy, due), "the returned piece is not the predicted one"
            assert torch.equal(self.store.slices[piece].weights, reference[piece].weights)
        for update, sent in self.all.items():
            assert self.whole[update] == 1 or (sent.dropped and self.whole[update] <= 1)
        assert not self.store._entries and not self.store._entry_of and not self.store._applied_pieces, (
            "the store keeps an entry"
        )
        assert all(not piece.held and not piece.unordered for piece in self.store._pieces), "the store keeps a buffer"


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
@tries(40, 200, suppress_health_check=list(HealthCheck))
@given(pieces=st.integers(1, 4), correct=st.sampled_from(CORRECTIONS), actions=st.lists(ACTIONS, max_size=80))
def test_every_piece_is_applied_once_in_the_order_of_the_log_and_nobody_waits(
    orders: str, pieces: int, correct: Correction, actions: list[object]
) -> None:
    """The returned piece is the piece after the step, or as predicted for the expected staleness."""
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
    """The connection was lost at that moment, so the worker sends the piece over a new one."""
    play = Play(1)
    play.order([0], in_order=False)
    play.put(0, 0)
    assert play.works
    play.put(0, 0)
    play.apply(0)
    assert not play.works
    assert len(play.made[0]) == 1


def test_a_later_update_overtakes_only_at_other_pieces() -> None:
    play = Play(2)
    play.order([0], in_order=True)
    play.order([1], in_order=True)
    play.put(1, 0)
    play.put(1, 1)
    assert not play.works, "worker 0 comes first at both pieces"
    play.put(0, 1)
    play.apply(1)
    assert [work.updates[0].worker for work in (*play.made[1], play.works[1])] == [0, 1]
    assert 0 not in play.works, "piece 0 still waits for worker 0"


def test_an_update_that_is_cancelled_before_the_log_names_it_is_not_waited_for() -> None:
    """The log waited for a checkpoint before it named the update, and the push was cancelled meanwhile."""
    play = Play(1)
    play.drop(0)
    play.order([0, 1], in_order=True)
    play.put(1, 0)
    assert [update.worker for update in play.works[0].updates] == [1]


def test_an_update_that_the_log_has_not_named_is_discarded_with_its_worker() -> None:
    play = Play(2)
    play.put(0, 1)
    play.store.fence(0, 2)
    assert not any(piece.held for piece in play.store._pieces)


def test_pieces_that_were_applied_before_their_worker_died_stay() -> None:
    play = Play(2)
    play.order([0], in_order=True)
    play.put(0, 1)
    play.apply(1)
    play.put(0, 0)
    play.drop(0)
    play.apply(0)
    assert [len(works) for works in play.made] == [1, 1], "piece 0 was being applied, and is finished"
    assert play.whole[Identity(0, 1, 1)] == 0, "but the update is not reported as received"


def test_a_piece_sent_again_is_predicted_from_its_current_weights() -> None:
    """The answer was lost. Others have updated the piece, so fewer steps remain until the worker's next update."""
    play = Play(1, "full")

    def update_by(worker: int, expected: int | None) -> Identity:
        update = play.sent[worker].update
        play.issued += 1
        play.take(play.store.order(StreamUpdates(play.issued, (update,), (1.0,), True, WORKERS, expected)))
        play.put(worker, 0)
        play.apply(0)
        return update

    (part,) = play.store.slices
    mine = update_by(0, expected=3)
    assert torch.equal(play.store.copy_for(mine, 0), part.ahead(3, "full"))
    for worker, left in ((1, 2), (2, 1), (3, 0)):
        other = update_by(worker, expected=None)
        assert torch.equal(play.store.copy_for(mine, 0), part.ahead(left, "full"))
        assert torch.equal(play.store.copy_for(other, 0), part.weights), "its staleness is unknown"
    assert not torch.equal(part.ahead(1, "full"), part.weights), "the prediction must differ for this test"
    assert torch.equal(play.store.copy(0), part.weights)
    assert torch.equal(play.store.copy(0, 2), part.ahead(2, "full"))


def test_a_held_update_is_not_reported_unless_the_order_asks_for_it() -> None:
    updates = (Identity(0, 1, 1), Identity(1, 1, 1))
    for report_held in (False, True):
        store = StreamedStore(slices(1))
        store.version = 0
        store.order(StreamUpdates(1, updates, (1.0, 1.0), report_held=report_held))
        store.put(updates[0], 0, HeldUpdate(gradient(updates[0], 0), (1.0,)))
        assert store.is_held(updates[0]) == report_held


def test_each_update_of_a_piece_counts_with_its_own_rate() -> None:
    layout = Layout((Tensor("w", (EACH,)),))
    store = StreamedStore([Slice(layout, 0, EACH, OptimizerSpec("SGD", ({"lr": 1.0},)))])
    store.version = 0
    updates = (Identity(0, 1, 1), Identity(1, 1, 1))
    assert not store.order(StreamUpdates(1, updates, (1.0, 1.0)))
    assert store.put(updates[0], 0, HeldUpdate(torch.full((EACH,), 2.0), (1.0,))) is None
    work = store.put(updates[1], 0, HeldUpdate(torch.full((EACH,), 3.0), (0.25,)))
    assert work is not None
    work.apply()
    assert torch.allclose(store.slices[0].weights, torch.full((EACH,), -(2.0 + 0.75)))
