"""A push to all shards at once: every piece once, in order at each shard, and no shard waits for another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("msgspec")

from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.worker.push_to_all import SENDERS, push_order, push_to_all
from paceline.serve.worker.shard_link import ShardLink
from tries import tries

PATIENCE = 20.0  # seconds after which a test has failed
shard_sizes = st.lists(st.integers(1, 5), min_size=1, max_size=SENDERS + 4)


def shards_with(sizes: list[int]) -> list[ShardLink]:
    """Return shards with these numbers of pieces of one element, dealt in no order."""
    elements = iter(range(sum(sizes)))
    return [
        ShardLink(number, Endpoint("", 1), tuple((k, k + 1) for k in islice(elements, size)))
        for number, size in enumerate(sizes)
    ]


class Sent:
    """An exchange that notes what is sent, and calls `on_send` before."""

    def __init__(self, on_send: Callable[[ShardLink, int], None] = lambda shard, piece: None) -> None:
        self.on_send, self.places, self._lock = on_send, list[tuple[int, int]](), threading.Lock()

    def send(self, shard: ShardLink, piece: int) -> None:
        self.on_send(shard, piece)
        with self._lock:
            self.places.append((shard.number, piece))

    def of(self, shard: int) -> list[int]:
        return [piece for number, piece in self.places if number == shard]


def push(shards: list[ShardLink], sent: Any, check: Callable[[], None] = lambda: None, backward: Any = None) -> None:
    push_to_all(shards, 0, sent, check, backward)


@tries(60, 200)
@given(shard_sizes, st.integers(0, 12), st.booleans())
def test_the_order_has_every_piece_once(sizes: list[int], worker: int, from_the_end: bool) -> None:
    shards = shards_with(sizes)
    order = push_order(shards, worker, from_the_end)
    assert len(set(order)) == len(order) == sum(sizes)
    starts = [shard.pieces[piece][0] for shard, piece in order]
    if from_the_end:
        assert starts == sorted(starts, reverse=True)
        return
    rows = [piece for _, piece in order]
    assert rows == sorted(rows)
    for row in set(rows):
        numbers = [shard.number for shard, piece in order if piece == row]
        assert numbers == sorted(numbers, key=lambda number: (number - worker - 1) % len(shards))


@tries(20, 100)
@given(shard_sizes, st.booleans())
def test_every_shard_gets_its_pieces_once_and_in_order(sizes: list[int], from_the_end: bool) -> None:
    class Computed:
        def wait(self, start: int) -> None: ...

    sent = Sent()
    push(shards_with(sizes), sent, backward=Computed() if from_the_end else None)
    for number, size in enumerate(sizes):
        assert sent.of(number) == (list(reversed(range(size))) if from_the_end else list(range(size)))


@pytest.mark.parametrize("slow", range(SENDERS))
def test_a_shard_that_receives_nothing_holds_up_no_other_shard(slow: int) -> None:
    """Everything else is sent while the slow shard's first piece is still under way."""
    others = threading.Semaphore(0)

    def on_send(shard: ShardLink, piece: int) -> None:
        if shard.number != slow:
            others.release()
        elif piece == 0:
            for _ in range(3 * (SENDERS - 1)):
                assert others.acquire(timeout=PATIENCE)

    sent = Sent(on_send)
    push(shards_with([3] * SENDERS), sent)
    assert len(sent.places) == 3 * SENDERS


def test_only_computed_pieces_are_sent() -> None:
    computed = threading.Condition()
    border = [10]  # elements from here on are computed

    class Computing:
        def wait(self, start: int) -> None:
            with computed:
                assert computed.wait_for(lambda: border[0] <= start, PATIENCE)

    sizes = [5, 5]
    sent = Sent(lambda shard, piece: None if shard.pieces[piece][0] >= border[0] else pytest.fail("not computed"))
    pushing = threading.Thread(target=push, args=(shards_with(sizes), sent), kwargs={"backward": Computing()})
    pushing.start()
    for start in reversed(range(10)):
        with computed:
            border[0] = start
            computed.notify_all()
    pushing.join(PATIENCE)
    assert len(sent.places) == 10


@pytest.mark.parametrize("shards", [1, 2, SENDERS + 3])
def test_an_error_of_any_sender_ends_the_push(shards: int) -> None:
    calls = iter(range(1000))

    def check() -> None:
        if next(calls) >= shards:
            raise ConnectionError("This incarnation is over.")

    sent = Sent()
    with pytest.raises(ConnectionError, match="over"):
        push(shards_with([4] * shards), sent, check)
    assert len(sent.places) < 4 * shards
    assert threading.active_count() < 50
