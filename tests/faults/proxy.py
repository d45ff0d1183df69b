"""A proxy in a process that can disturb the connections that the process opens at a chosen message.

It parses the frames that pass, so that a fault can happen before a message, half-way through it or after it:
cut (close both directions in order), reset (close both at once), mute (drop all further bytes of this direction).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from faults.inject import Injector
from paceline.serve.wire.frames import PREFIX, decode_prefix

CHUNK = 1 << 16  # bytes that are relayed at a time


class Proxy:
    """Relays the connections that this process opens."""

    def __init__(self, injector: Injector, read: Callable[[str, socket.socket, int], bytes] | None = None) -> None:
        """read(name, socket, size): reads up to `size` bytes of the body of a message; for slow readers."""
        self._injector, self._read = injector, read or (lambda _name, sock, size: sock.recv(size))

    def connect(self, address: tuple[str, int], timeout: float) -> socket.socket:
        """Open a connection through the proxy, like `socket.create_connection`."""
        there = _create_connection(address, timeout)
        there.settimeout(None)
        ours, near = socket.socketpair()
        here = _Tcp(ours)
        for source, target in ((near, there), (there, near)):
            threading.Thread(target=self._pump, args=(source, target), daemon=True).start()
        return here

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        """Relay frames in one direction until the connection ends."""
        muted = False
        try:
            while True:
                prefix = _receive_exactly(source, PREFIX.size)
                head_size, body_size = decode_prefix(prefix)
                head = _receive_exactly(source, head_size)
                name = str(msgspec.msgpack.decode(head)[0])
                how = self._due(name, "before")
                if how:
                    muted = self._disturb(how, source, target)
                half = self._due(name, "half")
                frame = prefix + head
                if half and not body_size:
                    frame = frame[: len(frame) // 2]
                if not muted:
                    target.sendall(frame)
                due = body_size // 2 if half else body_size
                self._relay_body(name, source, target, due, muted)
                if half:
                    muted = self._disturb(half, source, target)
                    self._relay_body(name, source, target, body_size - due, muted)
                how = self._due(name, "after")
                if how:
                    muted = self._disturb(how, source, target)
        except OSError:
            for each in (source, target):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _relay_body(self, name: str, source: socket.socket, target: socket.socket, size: int, muted: bool) -> None:
        while size:
            data = self._read(name, source, min(size, CHUNK))
            if not data:
                raise ConnectionError
            size -= len(data)
            if not muted:
                target.sendall(data)

    def _due(self, name: str, when: str) -> str | None:
        """Return how to disturb the connection here, or None."""
        fault = self._injector.due("relay", name, when)
        return fault.how if fault else None

    def _disturb(self, how: str, source: socket.socket, target: socket.socket) -> bool:
        """Return True if this direction is mute from now on. Otherwise end the connection with an error."""
        if how == "mute":
            return True
        if how == "reset":
            for each in (source, target):
                if each.family == socket.AF_UNIX:
                    each.shutdown(socket.SHUT_RDWR)
                else:
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    each.shutdown(socket.SHUT_RD)  # wakes the other direction, which would keep the socket open
                    each.close()
        raise ConnectionError(how)


class _Tcp(socket.socket):
    """A Unix socket that accepts the options of TCP and ignores them."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())

    def setsockopt(self, level: int, *option: Any) -> None:
        if level != socket.IPPROTO_TCP:
            super().setsockopt(level, *option)


_create_connection = socket.create_connection


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionError
        data += more
    return data
