"""The wire: frames of a small typed head and raw bytes. No pickle anywhere.

A frame is sixteen bytes (magic, version, length of the head, length of the body), a head and a body. The head is one of
the messages of `messages.py` in MessagePack, checked against its types when it is read. The body is raw tensor bytes.
Whoever reads a frame says which messages it takes and how long a body may be; both are checked before anything is
allocated, and a body is received into a buffer that already exists.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

MAGIC = b"pcln"
VERSION = 1
PREFIX = struct.Struct("!4sBxHQ")
MAX_HEAD = 0xFFFF
CHUNK = 1 << 18  # bytes asked of the kernel at a time
PIECE = 1 << 22  # bytes of a body sent at a time


_TCP_INFO = struct.Struct("=16xI4xI116xII8xQ")  # of Linux's tcp_info: the fields that `_outstanding` needs


def _outstanding(sock: Any) -> tuple[int, float]:
    """Bytes that the peer has not acknowledged, less what one round trip carries, and the rate at which it does.

    Nothing where the system does not tell, or the connection is lost: whoever receives over it sees that.
    """
    if not hasattr(socket, "TCP_INFO") or not sys.platform.startswith("linux"):
        return 0, 0.0
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return 0, 0.0
    if len(info) < _TCP_INFO.size:  # a kernel from before 4.9
        return 0, 0.0
    mss, unacked, unsent, round_trip, rate = _TCP_INFO.unpack(info)
    return int(mss * unacked + unsent - rate * round_trip * 1e-6), float(rate)


class WireError(ConnectionError):
    """What came over the wire is not what was agreed; the connection is of no use any more."""


class ConnectionClosed(ConnectionError):
    """The connection is lost, though nothing wrong was said."""


def encode(message: msgspec.Struct, body_size: int = 0) -> bytes:
    """A frame up to its body."""
    head = msgspec.msgpack.encode(message)
    if len(head) > MAX_HEAD:
        raise WireError(f"A {type(message).__name__} of {len(head)} bytes does not fit into a head.")
    return PREFIX.pack(MAGIC, VERSION, len(head), body_size) + head


def decode_prefix(prefix: bytes | bytearray | memoryview) -> tuple[int, int]:
    """The lengths of head and body that a frame's first sixteen bytes announce."""
    magic, version, head_size, body_size = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise WireError("The peer does not speak paceline's protocol.")
    if version != VERSION:
        raise WireError(f"The peer speaks version {version} of the protocol, and this is version {VERSION}.")
    return head_size, body_size


class MessageDecoder:
    """Decodes heads of the messages that are taken here, and no others."""

    def __init__(self, messages: Any) -> None:
        """`messages`: a union of tagged msgspec structs."""
        self.taken = messages
        self._decoder = msgspec.msgpack.Decoder(messages)

    def head(self, data: bytes | bytearray | memoryview) -> Any:
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is not UTF-8
            raise WireError(f"The peer sent a message that is not taken here: {error}.") from None


class PiecedBody:
    """A body that is sent in pieces, and may be exchanged for a copy of itself in between.

    The lock is held while a piece is copied out, and never while anybody waits.
    """

    def __init__(self, rest: memoryview) -> None:
        self.rest = rest
        self.lock = threading.Lock()


class Channel:
    """Frames over a blocking socket. One thread may send while another receives."""

    def __init__(self, sock: Any, reader: MessageDecoder) -> None:
        """`sock`: a socket.socket or a TlsSocket."""
        self._socket = sock
        self._is_plain = isinstance(sock, socket.socket)
        self._reader = reader
        self._prefix = bytearray(PREFIX.size)
        self._deadline: float | None = None
        self._timeout: float | None = None
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: msgspec.Struct, body: memoryview | None = None) -> None:
        """Send a frame; a body goes out as it lies in memory."""
        head = encode(message, len(body) if body is not None else 0)
        if body is None:
            self._socket.sendall(head)
            return
        if self._is_plain:  # in one call, or the head would be a packet of its own
            sent = self._socket.sendmsg((head, body[:PIECE]))
            if sent < len(head):  # a full buffer took no more of it in time
                self._socket.sendall(head[sent:])
            body = body[max(0, sent - len(head)) :]
        else:
            self._socket.sendall(head)
        for start in range(0, len(body), PIECE):  # a timeout is one of a piece, however much there is to send
            self._socket.sendall(body[start : start + PIECE])

    def send_pieces(self, message: msgspec.Struct, body: PiecedBody, sent: Callable[[int], None] | None = None) -> None:
        """Send a frame whose body may be exchanged for a copy of itself while it is being sent.

        sent: is told how many bytes more are out, as they go.
        """
        self._socket.sendall(encode(message, len(body.rest)))
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        self._socket.setblocking(False)
        try:
            while len(body.rest):
                poll.poll()
                with body.lock:
                    try:
                        size = self._socket.send(body.rest[:PIECE])
                    except BlockingIOError:
                        continue
                    body.rest = body.rest[size:]
                if sent:
                    sent(size)
        finally:
            self._socket.setblocking(True)

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """All that is received in here must come within so many seconds: TimeoutError."""
        self._deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = None
            self._socket.settimeout(None if self._is_plain else self._timeout)

    def limit_silence(self, seconds: float) -> None:
        """From now on, silence for so long is an OSError."""
        self._timeout = seconds
        if not self._is_plain:
            self._socket.settimeout(seconds)
            return
        # The kernel's own, and not Python's, which would wake for every packet to see whether it is in time.
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)

    def limit_cut(self, seconds: float) -> None:
        """A connection over which nothing gets through for about so long ends with an error, though nobody sends."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        pause = max(1, int(seconds / 4))
        for option, value in (
            ("TCP_KEEPIDLE", pause),
            ("TCP_KEEPINTVL", pause),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", max(1, int(seconds * 1000))),
        ):
            if hasattr(socket, option):  # not everywhere
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def hold_little_back(self, size: int) -> None:
        """No more than about so many bytes wait in the kernel to be sent: what counts as sent is on its way."""
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size)

    def drain(self, size: int) -> None:
        """Until the peer has all that was sent but for about so many bytes, and what is on its way anyhow.

        The kernel takes far more than the link carries, and would carry it beside what is sent to somebody else next.
        """
        while True:
            waiting, rate = _outstanding(self._socket)
            if waiting <= size:
                return
            time.sleep(min(max((waiting - size) / rate, 3e-4), 2e-3) if rate else 1e-3)

    def receive(
        self, into: Callable[[Any, int], memoryview] | None = None, seen: Callable[[int], None] | None = None
    ) -> Any:
        """The next message. If it has a body, `into(message, size)` says where it goes; it may refuse by WireError.

        seen: is told how many bytes of the body are there, as they come.
        """
        self._fill(memoryview(self._prefix), start=True)
        head_size, body_size = decode_prefix(self._prefix)
        head = bytearray(head_size)
        self._fill(memoryview(head))
        message = self._reader.head(head)
        if body_size:
            if into is None:
                raise WireError(f"A {type(message).__name__} has no body, and the peer announced {body_size} bytes.")
            place = into(message, body_size)
            if len(place) != body_size:
                name = type(message).__name__
                raise WireError(f"A {name} of {len(place)} bytes was expected, and the peer announced {body_size}.")
            self._fill(place, seen=seen)
        return message

    def _fill(self, place: memoryview, start: bool = False, seen: Callable[[int], None] | None = None) -> None:
        size = len(place)
        while len(place):
            if self._deadline is not None:
                left = self._deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError("timed out")
                self._socket.settimeout(left)
            if self._is_plain and self._deadline is None:  # all that is asked for, or what there is before an end
                count = self._socket.recv_into(place, min(len(place), CHUNK), socket.MSG_WAITALL)
            else:
                count = self._socket.recv_into(place, min(len(place), CHUNK))
            if count == 0:
                if start and len(place) == PREFIX.size:
                    raise ConnectionClosed("The peer has closed the connection.")
                raise ConnectionClosed("The connection was cut in the midst of a message.")
            place, start = place[count:], False
            if seen:
                seen(size - len(place))

    def finish(self) -> None:
        """Say that nothing more will be sent. What the peer still sends can be received."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """End the connection; a thread that waits in it wakes with an error, and may close it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and let go of it."""
        self.cut()
        self._socket.close()
