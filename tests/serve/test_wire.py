"""Frames arrive as they were sent, and everything else is refused. The handshake proves that both know the token."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("msgspec")

from paceline.serve.wire import handshake
from paceline.serve.wire.caller import Caller
from paceline.serve.wire.frames import (
    MAGIC,
    PREFIX,
    VERSION,
    Channel,
    ConnectionClosed,
    MessageDecoder,
    WireError,
    encode,
)
from paceline.serve.wire.messages import Accepted, Challenge, GrantIteration, Join, Pull, Push, Refused
from tries import tries

ACCEPTED = MessageDecoder(Push | Pull | GrantIteration)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = _tcp_pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    ours.settimeout(5.0)
    return ours, theirs


def test_a_message_and_its_body_arrive_as_they_were_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = Channel(pair[0], ACCEPTED), Channel(pair[1], ACCEPTED)
    sent = bytes(range(256)) * 40_000
    received = bytearray(len(sent))
    sender = threading.Thread(target=theirs.send, args=(Push(7, (0.1, 0.2)), memoryview(sent)))
    sender.start()
    assert ours.receive(lambda message, size: memoryview(received)) == Push(7, (0.1, 0.2))
    sender.join()
    assert bytes(received) == sent
    theirs.send(GrantIteration(8, 3, None))
    assert ours.receive() == GrantIteration(8, 3, None)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not speak paceline"),
        (PREFIX.pack(MAGIC, VERSION + 1, 0, 0), "version 2 of the protocol"),
        (PREFIX.pack(MAGIC, VERSION, 3, 0) + b"\xc1\xc1\xc1", "not accepted here"),
        (encode(Join(1)), "not accepted here"),  # a message, but not one of those that are accepted here
        (encode(Pull(1), 2**63), "was expected"),
    ],
)
def test_a_frame_that_breaks_the_protocol_is_refused(
    pair: tuple[socket.socket, socket.socket], frame: bytes, why: str
) -> None:
    pair[1].sendall(frame)
    pair[1].shutdown(socket.SHUT_WR)
    with pytest.raises(WireError, match=why):
        Channel(pair[0], ACCEPTED).receive(lambda message, size: memoryview(bytearray(8)))


def test_a_truncated_message_is_a_lost_connection(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].sendall(encode(Pull(1))[:-1])
    pair[1].close()
    with pytest.raises(ConnectionClosed, match="cut in the middle"):
        Channel(pair[0], ACCEPTED).receive()


def test_an_unexpected_body_is_refused_before_it_is_read(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].sendall(encode(GrantIteration(1, 1, None), 1 << 40))
    with pytest.raises(WireError, match="has no body"):
        Channel(pair[0], ACCEPTED).receive()


def test_a_peer_that_hangs_up_between_messages_does_not_break_the_protocol(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[1].close()
    with pytest.raises(ConnectionClosed):
        Channel(pair[0], ACCEPTED).receive()


@tries(80, 300)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_message_or_are_refused(data: bytes) -> None:
    ours, theirs = _tcp_pair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        channel = Channel(ours, ACCEPTED)
        try:
            while True:
                assert isinstance(
                    channel.receive(lambda _m, _s: memoryview(bytearray(16))), Push | Pull | GrantIteration
                )
        except (WireError, ConnectionClosed):
            pass


def _buffer(buffer: memoryview, _message: Any, _size: int) -> memoryview:
    return buffer


class Dribble:
    """A socket that delivers these bytes in packets of these sizes, over and over."""

    def __init__(self, data: bytes, packets: list[int]) -> None:
        self._data, self._packets, self._next = data, packets, 0

    def recv_into(self, buffer: memoryview) -> int:
        size = min(len(buffer), self._packets[self._next % len(self._packets)], len(self._data))
        self._next += 1
        buffer[:size], self._data = self._data[:size], self._data[size:]
        return size

    def settimeout(self, seconds: float | None) -> None: ...

    def setsockopt(self, *option: int) -> None: ...


MESSAGES = st.one_of(
    st.builds(Push, st.integers(0, 1 << 40), st.lists(st.floats(0, 1), max_size=60).map(tuple)),
    st.builds(Pull, st.integers(0, 1 << 40)),
)
PACKETS = st.lists(st.integers(1, 700), min_size=1, max_size=5)


@tries(80, 300)
@given(st.lists(st.tuples(MESSAGES, st.binary(max_size=600)), max_size=6), PACKETS)
def test_frames_are_received_however_the_network_cuts_them(sent: list[tuple[Any, bytes]], packets: list[int]) -> None:
    """A head may be longer or shorter than the one before, and a small body may arrive together with it."""
    frames = b"".join(encode(message, len(body)) + body for message, body in sent)
    channel = Channel(Dribble(frames, packets), ACCEPTED)
    for message, body in sent:
        received, seen = memoryview(bytearray(len(body))), [0]
        assert channel.receive(partial(_buffer, received), seen.append) == message
        assert bytes(received) == body
        assert seen == sorted(seen) and seen[-1] == len(body), "all of the body is reported, for it is checked then"
    with pytest.raises(ConnectionClosed, match="has closed"):
        channel.receive()


def test_what_the_kernel_does_not_take_at_once_is_returned_and_can_follow(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = Channel(pair[0], ACCEPTED), Channel(pair[1], ACCEPTED)
    body = bytes(range(256)) * (1 << 16)  # 16 MB, more than a socket holds
    rest = theirs.send_at_once(Push(1, ()), memoryview(body))
    assert rest is not None and 0 < len(rest[1]) < len(body)
    following = threading.Thread(target=theirs.send_rest, args=rest)
    following.start()
    received = bytearray(len(body))
    assert ours.receive(lambda _m, _s: memoryview(received)) == Push(1, ())
    following.join()
    assert received == body
    assert theirs.send_at_once(Pull(3)) is None
    assert ours.receive() == Pull(3)


# The handshake


def _shake_hands(ours: bytes, theirs: bytes) -> tuple[str, str]:
    """Return the outcome for the listener and for the caller of a handshake with these two tokens."""
    outcomes = {}
    listener, caller = _tcp_pair()
    listener.setblocking(False)

    def listen() -> None:
        try:
            asyncio.run(Caller(listener).shake_hands(ours, "generation"))
            outcomes["listener"] = "accepted"
        except WireError as error:
            outcomes["listener"] = str(error)

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        outcomes["caller"] = handshake.call(Channel(caller, MessageDecoder(Challenge | Accepted | Refused)), theirs)
    except WireError as error:
        outcomes["caller"] = str(error)
    thread.join()
    listener.close()
    caller.close()
    return outcomes["listener"], outcomes["caller"]


def test_the_handshake_succeeds_when_both_know_the_token() -> None:
    assert _shake_hands(b"secret", b"secret") == ("accepted", "generation")


def test_a_caller_with_a_wrong_token_is_told_so() -> None:
    listener, caller = _shake_hands(b"secret", b"guess")
    assert "token is wrong" in listener
    assert "token is wrong" in caller


def test_a_recorded_handshake_cannot_be_replayed() -> None:
    challenge = handshake.new_challenge("generation")
    recorded = handshake.proof(b"secret", challenge)
    assert isinstance(handshake.check_proof(b"secret", challenge, recorded), Accepted)
    assert isinstance(handshake.check_proof(b"secret", handshake.new_challenge("generation"), recorded), Refused)


def test_a_server_that_does_not_know_the_token_is_noticed() -> None:
    challenge = handshake.new_challenge("generation")
    answer = handshake.proof(b"secret", challenge)
    with pytest.raises(WireError, match="does not know"):
        handshake.verify(b"secret", challenge, answer, Accepted(b"x" * 32))


@pytest.mark.parametrize("first", [1, 15, 16, 30, 31, 32, 40, 1000])
def test_a_frame_is_complete_however_little_of_it_the_kernel_takes_first(first: int) -> None:
    class Reluctant(socket.socket):
        def sendmsg(self, buffers: Any, *more: Any) -> int:
            return self.send(b"".join(buffers)[:first])

    ours, theirs = _tcp_pair()
    sent, received = bytes(range(256)), bytearray(256)
    with ours, Reluctant(fileno=theirs.detach()) as reluctant:
        Channel(reluctant, ACCEPTED).send(Push(7, (0.5,)), memoryview(sent))
        assert Channel(ours, ACCEPTED).receive(lambda _message, _size: memoryview(received)) == Push(7, (0.5,))
    assert received == sent


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="the system does not report unacknowledged bytes")
def test_drain_returns_when_the_peer_has_nearly_everything() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)  # so that the peer's kernel buffers little
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with ours, theirs:
        theirs.setblocking(False)
        size = 0
        with contextlib.suppress(BlockingIOError):
            while size < 1 << 20:
                size += theirs.send(bytes(1 << 16))
        draining = threading.Thread(target=Channel(theirs, ACCEPTED).drain, args=(1 << 14,))
        draining.start()
        draining.join(0.2)
        assert draining.is_alive(), "the peer has read nothing yet"
        while size > 0:
            size -= len(ours.recv(1 << 16))
        draining.join(5.0)
        assert not draining.is_alive()


def test_drain_returns_at_once_on_a_lost_connection(pair: tuple[socket.socket, socket.socket]) -> None:
    """It must not wait for an acknowledgement that never comes. The receiving side notices the loss."""
    channel = Channel(pair[0], ACCEPTED)
    channel.close()
    channel.drain(0)
