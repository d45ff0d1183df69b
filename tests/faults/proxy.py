"""The network between a worker and its servers: a proxy in the worker's process that can spoil it at a chosen message.

It reads frames as they pass, so that a fault can be put at a message's first byte, in its middle or behind it:
cut (both ways, in order), reset (both ways, at once), mute (this direction says nothing more; the other one goes on).
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

MOST = 1 << 16


class Proxy:
    """Stands between this process and whomever it calls."""

    def __init__(self, injector: Injector, read: Callable[[str, socket.socket, int], bytes] | None = None) -> None:
        """`read(name, socket, most)`: how a body of such a message is read; for slow readers."""
        self._injector, self._read = injector, read or (lambda _name, sock, most: sock.recv(most))

    def connect(self, address: tuple[str, int], timeout: float) -> socket.socket:
        """As `socket.create_connection`, but through the proxy."""
        there = _create_connection(address, timeout)
        there.settimeout(None)
        ours, near = socket.socketpair()
        here = _Tcp(ours)
        for name, source, target in (("out", near, there), ("in", there, near)):
            threading.Thread(target=self._pump, args=(name, source, target), daemon=True).start()
        return here

    def _pump(self, _way: str, source: socket.socket, target: socket.socket) -> None:
        muted = False
        try:
            while True:
                prefix = _exactly(source, PREFIX.size)
                head_size, body_size = decode_prefix(prefix)
                head = _exactly(source, head_size)
                name = str(msgspec.msgpack.decode(head)[0])
                how = self._due(name, "before")
                if how:
                    muted = self._spoil(how, source, target)
                half = self._due(name, "half")
                frame = prefix + head
                if half and not body_size:
                    frame = frame[: len(frame) // 2]
                if not muted:
                    target.sendall(frame)
                due = body_size // 2 if half else body_size
                self._body(name, source, target, due, muted)
                if half:
                    muted = self._spoil(half, source, target)
                    self._body(name, source, target, body_size - due, muted)
                how = self._due(name, "after")
                if how:
                    muted = self._spoil(how, source, target)
        except OSError:
            for each in (source, target):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _body(self, name: str, source: socket.socket, target: socket.socket, size: int, muted: bool) -> None:
        while size:
            data = self._read(name, source, min(size, MOST))
            if not data:
                raise ConnectionError
            size -= len(data)
            if not muted:
                target.sendall(data)

    def _due(self, name: str, when: str) -> str | None:
        fault = self._injector.due("relay", name, when)
        return fault.how if fault else None

    def _spoil(self, how: str, source: socket.socket, target: socket.socket) -> bool:
        """True if this direction is mute from now on."""
        if how == "mute":
            return True
        if how == "reset":
            for each in (source, target):
                if each.family == socket.AF_UNIX:
                    each.shutdown(socket.SHUT_RDWR)
                else:
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    each.shutdown(socket.SHUT_RD)  # wakes the other direction, or the socket would stay open
                    each.close()
        raise ConnectionError(how)


class _Tcp(socket.socket):
    """A socket that bears the options of TCP, and does not heed them."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())

    def setsockopt(self, level: int, *option: Any) -> None:
        if level != socket.IPPROTO_TCP:
            super().setsockopt(level, *option)


_create_connection = socket.create_connection


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionError
        data += more
    return data
