"""The worker's side of streaming: pieces that are not back are sent again when a connection is lost."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("msgspec")

from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.frames import ConnectionClosed
from paceline.serve.wire.messages import Push, Refused, UpdatedPiece
from paceline.serve.worker.gradient import OutgoingGradient
from paceline.serve.worker.shard_link import ELEMENT, ShardLink
from paceline.serve.worker.streamed_exchange import StreamedExchange

PIECES = ((0, 2), (2, 5), (8, 9), (9, 12))
SIZE = 12


def new_shard(number: int = 0, pieces: tuple[tuple[int, int], ...] = PIECES) -> ShardLink:
    return ShardLink(number, Endpoint("", 1), pieces)


# Lost connections


class Line:
    """A connection that keeps what is sent over it. It receives the given answers, and then it is lost."""

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
        self.shard = new_shard()
        self.gradient = bytes(range(SIZE * ELEMENT))
        self.weights = bytearray(SIZE * ELEMENT)
        self.exchange = StreamedExchange(
            7,
            OutgoingGradient(memoryview(self.gradient), (1.0,), "float32", 1),
            memoryview(self.weights),
            self._raise_if_over,
        )

    def _raise_if_over(self, message: Any) -> None:
        if isinstance(message, Refused):
            raise PermissionError(message.reason)

    def connect(self, line: Line) -> Any:
        self.shard.channel = line  # type: ignore[assignment]
        return line

    def send(self, *pieces: int) -> None:
        for piece in pieces:
            self.exchange.send(self.shard, piece)

    def assert_all_returned(self) -> None:
        """Assert that the weights hold the returned pieces, and nothing else was written."""
        for piece, (start, stop) in enumerate(PIECES):
            assert self.weights[start * ELEMENT : stop * ELEMENT] == bytes([70 + piece]) * (ELEMENT * (stop - start))
        assert self.weights[5 * ELEMENT : 8 * ELEMENT] == bytes(3 * ELEMENT), "another shard holds these"


def returned(*pieces: int) -> list[UpdatedPiece]:
    return [UpdatedPiece(7, piece) for piece in pieces]


def test_only_pieces_that_are_not_back_are_sent_again_after_a_lost_connection() -> None:
    setting = Setting()
    first = setting.connect(Line(*returned(1, 0)))
    setting.send(0, 1, 2, 3)
    assert [piece for piece, _ in first.sent] == [0, 1, 2, 3]
    assert first.sent[2][1] == setting.gradient[8 * ELEMENT : 9 * ELEMENT]
    with pytest.raises(ConnectionClosed):
        setting.exchange.receive(setting.shard, first)
    second = setting.connect(Line(*returned(3, 1, 2)))  # piece 1 comes twice: it was pushed over both
    setting.exchange.receive(setting.shard, second)
    assert second.sent == first.sent[2:]
    setting.assert_all_returned()


def test_pieces_queued_without_a_connection_are_sent_over_the_next_one() -> None:
    setting = Setting()
    setting.send(0, 1)
    line = setting.connect(Line(*returned(0, 1, 2, 3)))
    setting.send(2)
    assert not line.sent, "earlier pieces must be sent first"
    with pytest.raises(ConnectionClosed):
        setting.exchange.receive(setting.shard, setting.connect(Line()))
    last = setting.connect(Line(*returned(0, 1, 2, 3)))
    setting.send(3)
    setting.exchange.receive(setting.shard, last)
    assert [piece for piece, _ in last.sent] == [0, 1, 2, 3]
    setting.assert_all_returned()


def test_a_new_connection_is_sent_all_queued_pieces() -> None:
    setting = Setting()
    setting.send(0, 1)
    line = setting.connect(Line(*returned(0, 1, 2, 3)))
    setting.send(2, 3)
    setting.exchange.receive(setting.shard, line)
    assert [piece for piece, _ in line.sent] == [0, 1, 2, 3]
    setting.assert_all_returned()


def test_a_connection_that_breaks_while_sending_is_cut_so_that_the_receiver_notices() -> None:
    setting = Setting()
    line = setting.connect(Line(broken=True))
    setting.send(0, 1)
    assert line.was_cut
    again = setting.connect(Line(*returned(0, 1, 2, 3)))
    setting.send(2)
    assert not again.sent, "lost pieces must be sent first"
    setting.send(3)
    setting.exchange.receive(setting.shard, again)
    assert [piece for piece, _ in again.sent] == [0, 1, 2, 3]
    setting.assert_all_returned()


def test_pieces_of_an_earlier_iteration_are_ignored() -> None:
    setting = Setting()
    line = setting.connect(Line(UpdatedPiece(6, 3), *returned(0, 1, 2), UpdatedPiece(6, 2), *returned(3)))
    setting.send(0, 1, 2, 3)
    setting.exchange.receive(setting.shard, line)
    setting.assert_all_returned()


def test_a_refusal_ends_the_exchange() -> None:
    setting = Setting()
    line = setting.connect(Line(*returned(0), Refused("NaN")))
    setting.send(0, 1)
    with pytest.raises(PermissionError, match="NaN"):
        setting.exchange.receive(setting.shard, line)


@pytest.mark.parametrize(("all_but", "spare"), [(0, 1000), (1, 1000), (3, 3000)])
def test_a_visit_ends_while_its_own_pieces_are_on_their_way(all_but: int, spare: int) -> None:
    """Four pieces of 1,000 bytes. At least a quarter of what the shard holds may always be on its way."""
    shard = new_shard(0, tuple((start, start + 250) for start in range(0, 1000, 250)))
    shard.channel = Mock()
    gradient = OutgoingGradient(memoryview(b""), (1.0,), "float32", 1)
    StreamedExchange(7, gradient, memoryview(b""), Mock()).drain(shard, all_but)
    shard.channel.drain.assert_called_once_with(spare)
