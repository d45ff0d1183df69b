"""Frames: a small typed head and raw bytes. There is no pickle anywhere.

A frame is a prefix of sixteen bytes (magic, version, length of the head, length of the body), a head and a body. The
head is one of the messages of `messages.py` in MessagePack, checked against its types when it is decoded. The body is
raw tensor bytes. The receiver says which messages it accepts and how long a body may be. Both are checked before any
memory is allocated, and a body is received into a buffer that already exists.
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

from paceline.serve.wire.link import LinkPath

MAGIC = b"pcln"
VERSION = 1
PREFIX = struct.Struct("!4sBxHQ")
MAX_HEAD = 0xFFFF
CHUNK = 1 << 18  # bytes requested from the kernel at a time
SEND_CHUNK = 1 << 22  # bytes of a body sent at a time
AHEAD = 1 << 8  # bytes of the largest head that is received together with its prefix


_TCP_INFO = struct.Struct("=16xI4xI116xII8xQ")  # the fields of Linux's tcp_info that `_unacknowledged` reads


def _unacknowledged(sock: Any) -> tuple[int, float]:
    """Return the unacknowledged bytes, less what one round trip carries, and the delivery rate in bytes per second.

    Return zeros if the system does not report them or the connection is lost. The receiving side notices a lost
    connection.
    """
    if not hasattr(socket, "TCP_INFO") or not sys.platform.startswith("linux"):
        return 0, 0.0
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return 0, 0.0
    if len(info) < _TCP_INFO.size:  # a kernel older than 4.9
        return 0, 0.0
    mss, unacked, unsent, round_trip, rate = _TCP_INFO.unpack(info)
    return int(mss * unacked + unsent - rate * round_trip * 1e-6), float(rate)


class WireError(ConnectionError):
    """The peer broke the protocol. The connection cannot be used any more."""


class ConnectionClosed(ConnectionError):
    """The connection is lost, but the peer did not break the protocol."""


def encode(message: msgspec.Struct, body_size: int = 0) -> bytes:
    """Return a frame up to its body: the prefix and the head."""
    head = msgspec.msgpack.encode(message)
    if len(head) > MAX_HEAD:
        raise WireError(f"A {type(message).__name__} of {len(head)} bytes exceeds the limit of {MAX_HEAD} for a head.")
    return PREFIX.pack(MAGIC, VERSION, len(head), body_size) + head


def decode_prefix(prefix: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Return the lengths of the head and of the body that a frame's first sixteen bytes announce."""
    magic, version, head_size, body_size = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise WireError("The peer does not speak paceline's protocol.")
    if version != VERSION:
        raise WireError(f"The peer speaks version {version} of the protocol, and this is version {VERSION}.")
    return head_size, body_size


class MessageDecoder:
    """Decodes the heads of the messages that one side of a conversation accepts, and refuses all others."""

    def __init__(self, messages: Any) -> None:
        """`messages`: a union of tagged msgspec structs."""
        self.taken = messages
        self._decoder = msgspec.msgpack.Decoder(messages)

    def head(self, data: bytes | bytearray | memoryview) -> Any:
        """Return the message that a head encodes. Raise WireError if it is not one of the accepted messages."""
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is not UTF-8
            raise WireError(f"The peer sent a message that is not accepted here: {error}.") from None


class PiecedBody:
    """A body that is sent in chunks, and may be replaced by a copy of itself between two chunks.

    A thread holds the lock while it copies a chunk to the kernel, and never while it waits.
    """

    def __init__(self, rest: memoryview) -> None:
        self.rest = rest
        self.lock = threading.Lock()


class Channel:
    """Frames over a blocking socket. One thread may send while another receives."""

    def __init__(self, sock: Any, decoder: MessageDecoder) -> None:
        """`sock`: a socket.socket or a TlsSocket."""
        self._socket = sock
        self._is_plain = isinstance(sock, socket.socket)
        self._decoder = decoder
        self._ahead = memoryview(bytearray(PREFIX.size + AHEAD))  # received, of the next frame's beginning
        self._start = self._stop = 0  # the bytes of `_ahead` that were not used yet
        self._head_size = 0  # of the last message; the next head is often as long
        self._deadline: float | None = None
        self._timeout: float | None = None
        self._path: LinkPath | None = None
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def emulate(self, path: LinkPath | None) -> None:
        """From now on, send over these emulated links. None: as fast as the system allows."""
        self._path = path

    def send(self, message: msgspec.Struct, body: memoryview | None = None) -> None:
        """Send a frame. The body is sent from where it is in memory, without a copy."""
        self._send_frame(encode(message, len(body) if body is not None else 0), body)

    def send_at_once(self, message: msgspec.Struct, body: memoryview | None = None) -> tuple[bytes, memoryview] | None:
        """Send as much of a frame as the kernel takes without waiting.

        Return what must follow with `send_rest`, or None if the whole frame is sent.
        """
        body = memoryview(b"") if body is None else body
        head = encode(message, len(body))
        if self._path or not self._is_plain:
            return head, body
        try:
            sent = self._socket.sendmsg((head, body), (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return head, body
        left = head[sent:], body[max(0, sent - len(head)) :]
        return left if any(left) else None

    def send_rest(self, head: bytes, body: memoryview) -> None:
        """Send what `send_at_once` has returned."""
        self._send_frame(head, body)

    def _send_frame(self, head: bytes, body: memoryview | None) -> None:
        if self._path:
            self._send_over(self._path, head, body)
            return
        if body is None:
            self._socket.sendall(head)
            return
        if self._is_plain:  # in one call, or the head would be a packet of its own
            sent = self._socket.sendmsg((head, body[:SEND_CHUNK]))
            if sent < len(head):  # the kernel took only a part of it before its timeout
                self._socket.sendall(head[sent:])
            body = body[max(0, sent - len(head)) :]
        else:
            self._socket.sendall(head)
        for start in range(0, len(body), SEND_CHUNK):  # in chunks, so that a timeout applies to each and not to all
            self._socket.sendall(body[start : start + SEND_CHUNK])

    def send_head(self, message: msgspec.Struct, body_size: int) -> None:
        """Send a frame up to its body. The body follows with `send_part`."""
        self._socket.sendall(encode(message, body_size))

    def send_part(self, part: memoryview) -> None:
        """Send the next bytes of a body whose head was sent with `send_head`."""
        for start in range(0, len(part), SEND_CHUNK):
            self._socket.sendall(part[start : start + SEND_CHUNK])

    def _send_over(self, path: LinkPath, head: bytes, body: memoryview | None) -> None:
        """Send a frame, each piece when the emulated links have carried it."""
        path.begin(len(head))
        self._socket.sendall(head)
        rest = body if body is not None else memoryview(b"")
        while len(rest):
            size = path.carry(len(rest))
            self._socket.sendall(rest[:size])
            rest = rest[size:]

    def send_pieces(self, message: msgspec.Struct, body: PiecedBody, sent: Callable[[int], None] | None = None) -> None:
        """Send a frame whose body may be replaced by a copy of itself meanwhile.

        sent: called with the number of bytes that each chunk has sent.
        """
        path, carried = self._path, 0  # bytes that the emulated links have carried and the socket has not taken yet
        head = encode(message, len(body.rest))
        if path:
            path.begin(len(head))
        self._socket.sendall(head)
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        self._socket.setblocking(False)
        try:
            while len(body.rest):
                if path and not carried:
                    carried = path.carry(len(body.rest))
                poll.poll()
                with body.lock:
                    try:
                        size = self._socket.send(body.rest[: carried or SEND_CHUNK])
                    except BlockingIOError:
                        continue
                    body.rest = body.rest[size:]
                carried = max(0, carried - size)
                if sent:
                    sent(size)
        finally:
            self._socket.setblocking(True)

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Raise TimeoutError if everything received inside this block takes longer than this in all."""
        self._deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = None
            self._socket.settimeout(None if self._is_plain else self._timeout)

    def limit_silence(self, seconds: float) -> None:
        """From now on, raise OSError if a send or a receive makes no progress for this long."""
        self._timeout = seconds
        if not self._is_plain:
            self._socket.settimeout(seconds)
            return
        # The kernel's timeouts. Python's own timeout would wake this thread for every packet.
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)

    def set_keepalive(self, seconds: float) -> None:
        """Have the kernel end the connection when the link is dead for about this long, even if nobody sends."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        pause = max(1, int(seconds / 4))
        for option, value in (
            ("TCP_KEEPIDLE", pause),
            ("TCP_KEEPINTVL", pause),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", max(1, int(seconds * 1000))),
        ):
            if hasattr(socket, option):  # not every system has all of them
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def limit_unsent(self, size: int) -> None:
        """Let at most about `size` unsent bytes wait in the kernel, so that sent bytes are really on their way."""
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size)

    def drain(self, size: int) -> None:
        """Wait until the peer has everything that was sent, except about `size` bytes and one round trip's worth.

        The kernel buffers far more than the link carries. Without this wait, the buffered bytes would compete with the
        bytes that are sent to another peer next. Over emulated links, everything that was sent has arrived.
        """
        while self._path is None:
            waiting, rate = _unacknowledged(self._socket)
            if waiting <= size:
                return
            time.sleep(min(max((waiting - size) / rate, 3e-4), 2e-3) if rate else 1e-3)

    def receive(
        self, into: Callable[[Any, int], memoryview] | None = None, seen: Callable[[int], None] | None = None
    ) -> Any:
        """Return the next message.

        into: called as into(message, size) if the message has a body. It returns the buffer to receive the body into,
        or raises WireError to refuse it. seen: called with the number of bytes of the body received so far.
        """
        # The prefix and a head as long as the last one, in one call. A call that waits costs as much as decoding both.
        self._receive_ahead(PREFIX.size, PREFIX.size + self._head_size, start=True)
        head_size, body_size = decode_prefix(self._take(PREFIX.size))
        if head_size <= AHEAD:
            self._head_size = head_size
            self._receive_ahead(head_size, head_size)
            message = self._decoder.head(self._take(head_size))
        else:
            head = memoryview(bytearray(head_size))
            self._fill(head)
            message = self._decoder.head(head)
        if body_size:
            if into is None:
                raise WireError(f"A {type(message).__name__} has no body, but the peer announced {body_size} bytes.")
            buffer = into(message, body_size)
            if len(buffer) != body_size:
                name = type(message).__name__
                raise WireError(f"A {name} of {len(buffer)} bytes was expected, but the peer announced {body_size}.")
            self._fill(buffer, seen=seen)
        return message

    def _take(self, size: int) -> memoryview:
        """Return the next bytes of those that were received ahead. They are valid until the next call that receives."""
        self._start += size
        return self._ahead[self._start - size : self._start]

    def _receive_ahead(self, least: int, most: int, start: bool = False) -> None:
        """Receive bytes ahead until there are `least` or more, and at most `most`. start: of a frame."""
        there = self._stop - self._start
        if there >= least:
            return
        self._ahead[:there] = bytes(self._ahead[self._start : self._stop])
        self._start, self._stop = 0, there
        while self._stop < least:
            if not (count := self._receive_some(self._ahead[self._stop : most], wait=False)):
                if start and not self._stop:
                    raise ConnectionClosed("The peer has closed the connection.")
                raise ConnectionClosed("The connection was cut in the middle of a message.")
            self._stop += count

    def _fill(self, buffer: memoryview, seen: Callable[[int], None] | None = None) -> None:
        """Receive until the buffer is full."""
        size, ahead = len(buffer), min(self._stop - self._start, len(buffer))
        if ahead:
            buffer[:ahead] = self._take(ahead)
            buffer = buffer[ahead:]
            if seen:
                seen(ahead)
        while len(buffer):
            if not (count := self._receive_some(buffer[:CHUNK], wait=True)):
                raise ConnectionClosed("The connection was cut in the middle of a message.")
            buffer = buffer[count:]
            if seen:
                seen(size - len(buffer))

    def _receive_some(self, buffer: memoryview, wait: bool) -> int:
        """Receive into the buffer, and return the number of bytes. wait: if possible, until it is full or the end."""
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            self._socket.settimeout(left)
        if wait and self._is_plain and self._deadline is None:  # MSG_WAITALL: return only with all bytes, or at the end
            return int(self._socket.recv_into(buffer, len(buffer), socket.MSG_WAITALL))
        return int(self._socket.recv_into(buffer))

    def finish(self) -> None:
        """Tell the peer that nothing more will be sent. Receiving is still possible."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """End the connection. A thread that waits in it wakes with an error, and may close the channel."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and release the socket."""
        self.cut()
        self._socket.close()
