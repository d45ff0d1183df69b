"""A worker's side of streaming: in which order pieces go out, and what is sent again when a connection is lost."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("msgspec")

from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.frames import ConnectionClosed
from paceline.serve.wire.messages import Push, Refused, UpdatedPiece
from paceline.serve.worker.streamed_exchange import ELEMENT, ShardLink, StreamedExchange, push_order

PIECES = ((0, 2), (2, 5), (8, 9), (9, 12))
SIZE = 12


def part(number: int = 0, pieces: tuple[tuple[int, int], ...] = PIECES) -> ShardLink:
    return ShardLink(number, Endpoint("", 1), pieces)


# Order


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 12), st.booleans())
def test_every_piece_is_pushed_once(sizes: list[int], worker: int, from_the_end: bool) -> None:
    """In turn from the shard after one's own; or as a backward pass makes them, whatever shard has them."""
    deck = iter(range(sum(sizes)))
    parts = [part(number, tuple((card, card + 1) for card in islice(deck, size))) for number, size in enumerate(sizes)]
    order = push_order(parts, worker, from_the_end)
    assert len(set(order)) == len(order) == sum(sizes)
    cards = [each.pieces[piece][0] for each, piece in order]
    if from_the_end:
        assert cards == sorted(cards, reverse=True)
    else:
        numbers = [each.number for each, _ in order]
        assert list(dict.fromkeys(numbers)) == [(worker + 1 + k) % len(parts) for k in range(len(parts))]
        assert numbers == sorted(numbers, key=numbers.index)
        assert all(cards[k] < cards[k + 1] for k in range(len(cards) - 1) if numbers[k] == numbers[k + 1])


# Loss


class Line:
    """A connection that keeps what is sent, and says what it was told to, in the end that it is lost."""

    def __init__(self, *answers: Any, broken: bool = False) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self._answers, self.broken, self.was_cut = list(answers), broken, False

    def send(self, message: Push, body: memoryview) -> None:
        if self.broken:
            raise BrokenPipeError
        self.sent.append((message.piece, bytes(body)))

    def receive(self, place: Any) -> Any:
        if not self._answers:
            raise ConnectionClosed("lost")
        message = self._answers.pop(0)
        if isinstance(message, UpdatedPiece):
            start, stop = PIECES[message.piece]
            body = bytes([10 * message.iteration + message.piece]) * (ELEMENT * (stop - start))
            place(message, len(body))[:] = body
        return message

    def cut(self) -> None:
        self.was_cut = True


class Setting:
    """Iteration 7 of a worker with one shard."""

    def __init__(self) -> None:
        self.part = part()
        self.gradient = bytes(range(SIZE * ELEMENT))
        self.weights = bytearray(SIZE * ELEMENT)
        self.exchange = StreamedExchange(
            lambda piece: Push(7, (1.0,), "float32", piece),
            memoryview(self.gradient),
            ELEMENT,
            memoryview(self.weights),
            self._raise_if_over,
        )

    def _raise_if_over(self, message: Any) -> None:
        if isinstance(message, Refused):
            raise PermissionError(message.reason)

    def connect(self, line: Line) -> Any:
        self.part.channel = line  # type: ignore[assignment]
        return line

    def send(self, *pieces: int) -> None:
        for piece in pieces:
            self.exchange.send(self.part, piece)

    def is_back(self) -> None:
        for piece, (start, stop) in enumerate(PIECES):
            assert self.weights[start * ELEMENT : stop * ELEMENT] == bytes([70 + piece]) * (ELEMENT * (stop - start))
        assert self.weights[5 * ELEMENT : 8 * ELEMENT] == bytes(3 * ELEMENT), "that is another shard's"


def back(*pieces: int) -> list[UpdatedPiece]:
    return [UpdatedPiece(7, piece) for piece in pieces]


def test_what_is_not_back_when_a_connection_is_lost_is_sent_again_and_nothing_else() -> None:
    setting = Setting()
    first = setting.connect(Line(*back(1, 0)))
    setting.send(0, 1, 2, 3)
    assert [piece for piece, _ in first.sent] == [0, 1, 2, 3]
    assert first.sent[2][1] == setting.gradient[8 * ELEMENT : 9 * ELEMENT]
    with pytest.raises(ConnectionClosed):
        setting.exchange.receive(setting.part, first)
    second = setting.connect(Line(*back(3, 1, 2)))  # 1 comes twice: it was asked for over both
    setting.exchange.receive(setting.part, second)
    assert second.sent == first.sent[2:]
    setting.is_back()


def test_what_falls_due_while_there_is_no_connection_is_sent_over_the_next() -> None:
    setting = Setting()
    setting.send(0, 1)
    line = setting.connect(Line(*back(0, 1, 2, 3)))
    setting.send(2)
    assert not line.sent, "in the order in which they fell due"
    with pytest.raises(ConnectionClosed):
        setting.exchange.receive(setting.part, setting.connect(Line()))
    last = setting.connect(Line(*back(0, 1, 2, 3)))
    setting.send(3)
    setting.exchange.receive(setting.part, last)
    assert [piece for piece, _ in last.sent] == [0, 1, 2, 3]
    setting.is_back()


def test_a_connection_that_was_never_received_over_is_sent_all_that_is_due() -> None:
    setting = Setting()
    setting.send(0, 1)
    line = setting.connect(Line(*back(0, 1, 2, 3)))
    setting.send(2, 3)
    setting.exchange.receive(setting.part, line)
    assert [piece for piece, _ in line.sent] == [0, 1, 2, 3]
    setting.is_back()


def test_a_connection_that_breaks_while_it_is_sent_over_is_cut_for_whoever_receives() -> None:
    setting = Setting()
    line = setting.connect(Line(broken=True))
    setting.send(0, 1)
    assert line.was_cut
    again = setting.connect(Line(*back(0, 1, 2, 3)))
    setting.send(2)
    assert not again.sent, "before what was lost with the old one"
    setting.send(3)
    setting.exchange.receive(setting.part, again)
    assert [piece for piece, _ in again.sent] == [0, 1, 2, 3]
    setting.is_back()


def test_what_comes_back_of_an_earlier_iteration_is_not_mistaken_for_this_ones() -> None:
    setting = Setting()
    line = setting.connect(Line(UpdatedPiece(6, 3), *back(0, 1, 2), UpdatedPiece(6, 2), *back(3)))
    setting.send(0, 1, 2, 3)
    setting.exchange.receive(setting.part, line)
    setting.is_back()


def test_a_refusal_ends_it() -> None:
    setting = Setting()
    line = setting.connect(Line(*back(0), Refused("NaN")))
    setting.send(0, 1)
    with pytest.raises(PermissionError, match="NaN"):
        setting.exchange.receive(setting.part, line)
