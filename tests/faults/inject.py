"""Injects faults into this process: at a chosen message or call, the process kills or stops itself, or cuts a channel.

It wraps the functions that send and receive messages. The product code contains nothing of this.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.scenario import Fault
from paceline.model import checkpoint
from paceline.serve.shard.store import WholeStore
from paceline.serve.shard.streamed_store import PieceWork, StreamedStore
from paceline.serve.wire.async_channel import AsyncChannel
from paceline.serve.wire.caller import Caller
from paceline.serve.wire.frames import Channel, PiecedBody, encode


class Injector:
    """Counts messages and calls in this process, and finds the faults that are due."""

    def __init__(self, party: str, faults: tuple[Fault, ...], folder: Path) -> None:
        self._faults = [(number, fault) for number, fault in enumerate(faults) if fault.party == party]
        self._folder = folder
        self._counts = dict.fromkeys((number for number, _ in self._faults), 0)

    def due(self, point: str, what: str, when: str) -> Fault | None:
        """Return the fault that is due at this point, and mark it as fired."""
        for number, fault in self._faults:
            if (fault.point, fault.what, fault.when) == (point, what, when) and self._is_counted(fault):
                self._counts[number] += 1
                if self._counts[number] == fault.nth and self._mark_fired(number):
                    return fault
        return None

    def _is_counted(self, fault: Fault) -> bool:
        """Return whether occurrences count already. Some faults wait for the first checkpoint, or for another fault."""
        if fault.after is not None and not (self._folder / f"fired-{fault.after}").exists():
            return False
        return not fault.saved or any((self._folder / "checkpoints").glob("version-*[0-9]"))

    def at(self, point: str, what: str, when: str, channel: Channel | None = None) -> None:
        """Execute the fault that is due at this point, if any."""
        fault = self.due(point, what, when)
        if fault:
            strike(fault, channel)

    def _mark_fired(self, number: int) -> bool:
        """Mark a fault as fired. Return False if another process has done so."""
        try:
            os.close(os.open(self._folder / f"fired-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def strike(fault: Fault, channel: Channel | None = None) -> None:
    """Execute a fault: cut the channel, or send this process a signal."""
    if fault.how == "cut":
        assert channel is not None
        channel.cut()
    else:
        os.kill(os.getpid(), signal.Signals[fault.how])


def inject(party: str, faults: tuple[Fault, ...], folder: Path) -> Injector:
    """Wrap the messages and calls of this process, if one of the faults concerns it."""
    injector = Injector(party, faults, folder)
    if injector._faults:
        _wrap_channel(injector)
        _wrap_async_channel(injector)
        _wrap_caller(injector)
        _wrap_calls(injector)
    return injector


def _wrap_channel(injector: Injector) -> None:
    send, send_pieces, receive = Channel.send, Channel.send_pieces, Channel.receive
    send_at_once, send_rest = Channel.send_at_once, Channel.send_rest
    unfinished: dict[Channel, str] = {}  # channel → the message whose rest is still to be sent

    def struck_halfway(channel: Channel, message: Any, body: memoryview | None) -> bytes | None:
        """Strike before a message, or after half of it. Return its other half in that case."""
        name = type(message).__name__
        injector.at("send", name, "before", channel)
        half = injector.due("send", name, "half")
        if not half:
            return None
        rest = _send_half(channel, encode(message, len(body or b"")), body)
        strike(half, channel)
        return rest  # a stopped process goes on here

    def watched_at_once(self: Channel, message: Any, body: memoryview | None = None) -> tuple[bytes, memoryview] | None:
        name = type(message).__name__
        if (rest := struck_halfway(self, message, body)) is not None:
            return rest, memoryview(b"")
        left = send_at_once(self, message, body)
        if left is None:
            injector.at("send", name, "after", self)
        else:
            unfinished[self] = name
        return left

    def watched_rest(self: Channel, head: bytes, body: memoryview) -> None:
        send_rest(self, head, body)
        if name := unfinished.pop(self, None):
            injector.at("send", name, "after", self)

    def watched_send(self: Channel, message: Any, body: memoryview | None = None) -> None:
        if (rest := struck_halfway(self, message, body)) is not None:
            self._socket.sendall(rest)
            return
        send(self, message, body)
        injector.at("send", type(message).__name__, "after", self)

    def watched_pieces(
        self: Channel, message: Any, body: PiecedBody, sent: Callable[[int], None] | None = None
    ) -> None:
        name = type(message).__name__
        injector.at("send", name, "before", self)
        half = injector.due("send", name, "half")
        if half:
            rest = _send_half(self, encode(message, len(body.rest)), body.rest)
            strike(half, self)
            self._socket.sendall(rest)
            return
        send_pieces(self, message, body, sent)
        injector.at("send", name, "after", self)

    def watched_receive(
        self: Channel,
        into: Callable[[Any, int], memoryview] | None = None,
        seen: Callable[[int], None] | None = None,
    ) -> Any:
        def watched_into(message: Any, size: int) -> memoryview:
            assert into is not None
            injector.at("receive", type(message).__name__, "half", self)  # its body is not read yet
            return into(message, size)

        message = receive(self, watched_into if into else None, seen)
        injector.at("receive", type(message).__name__, "after", self)
        return message

    Channel.send_at_once, Channel.send_rest = watched_at_once, watched_rest  # type: ignore[method-assign]
    Channel.send, Channel.send_pieces, Channel.receive = (  # type: ignore[method-assign]
        watched_send,
        watched_pieces,
        watched_receive,
    )


def _send_half(channel: Channel, head: bytes, body: memoryview | None) -> bytes:
    """Send the head and half of the body of a frame, or half of the head if it has no body. Return the rest."""
    frame = head + bytes(body or b"")
    half = len(head) + len(body) // 2 if body else len(head) // 2
    channel._socket.sendall(frame[:half])
    return frame[half:]


def _wrap_async_channel(injector: Injector) -> None:
    send, receive = AsyncChannel.send, AsyncChannel.receive

    def watched_send(self: AsyncChannel, message: Any, body: bytes = b"") -> None:
        name = type(message).__name__
        injector.at("send", name, "before")
        half = injector.due("send", name, "half")
        if half:
            frame = encode(message, len(body)) + body
            self._writer.write(frame[: len(frame) // 2])
            strike(half)
            self._writer.write(frame[len(frame) // 2 :])
            return
        send(self, message, body)
        injector.at("send", name, "after")

    async def watched_receive(self: AsyncChannel) -> Any:
        message = await receive(self)
        injector.at("receive", type(message).__name__, "after")
        return message

    AsyncChannel.send, AsyncChannel.receive = watched_send, watched_receive  # type: ignore[method-assign]


def _wrap_caller(injector: Injector) -> None:
    send, receive = Caller.send, Caller.receive

    async def watched_send(self: Caller, message: Any) -> None:
        name = type(message).__name__
        injector.at("send", name, "before")
        half = injector.due("send", name, "half")
        if half:
            frame = encode(message)
            self._socket.send(frame[: len(frame) // 2])
            strike(half)
            self._socket.send(frame[len(frame) // 2 :])
            return
        await send(self, message)
        injector.at("send", name, "after")

    async def watched_receive(self: Caller) -> Any:
        message = await receive(self)
        injector.at("receive", type(message).__name__, "after")
        return message

    Caller.send, Caller.receive = watched_send, watched_receive  # type: ignore[method-assign]


def _wrap_calls(injector: Injector) -> None:
    places: dict[str, tuple[Any, ...]] = {"apply": (WholeStore, PieceWork), "applied": (WholeStore, StreamedStore)}
    places |= {"save_shard": (checkpoint,), "finish": (checkpoint,)}
    for name, where in places.items():
        for place in where:
            _wrap_call(injector, place, name)


def _wrap_call(injector: Injector, place: Any, name: str) -> None:
    call = getattr(place, name)

    def watched(*arguments: Any) -> Any:
        injector.at("call", name, "before")
        half = injector.due("call", name, "half")
        if half:
            _HALF_DONE[name](call, *arguments)
            strike(half)
        result = call(*arguments)
        injector.at("call", name, "after")
        return result

    setattr(place, name, watched)


def _save_half_a_shard(call: Callable[..., None], folder: Path, number: int, *rest: Any) -> None:
    call(folder, number, *rest)
    path = checkpoint.shard_file(folder, number)
    os.truncate(path, path.stat().st_size // 2)


def _write_half_a_job_file(_call: Callable[..., None], part: Path, _job: Any) -> None:
    (part / "job.json").write_text('{"format": 1, "versi')


#: What a call leaves behind if the process is killed half-way through it.
_HALF_DONE: dict[str, Callable[..., None]] = {"save_shard": _save_half_a_shard, "finish": _write_half_a_job_file}
