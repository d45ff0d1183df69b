"""Replication: a shard passes every update on to its backup, and reports the update only when the backup has it too.

The backup is a second process of the same shard. It receives the same orders from the coordinator, so it needs only the
updates to hold the same state. The shard passes a worker's messages on over a connection of its own, as if it were the
worker, while they are still arriving. A backup that cannot be reached is reported to the coordinator. The shard goes on
alone only when the coordinator says so, because until then the coordinator may let the backup take over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from paceline.serve.shard.store import Fenced
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.frames import Channel, ConnectionClosed, MessageDecoder, WireError
from paceline.serve.wire.messages import (
    Accepted,
    Challenge,
    Expelled,
    Hello,
    InitialWeightsReceived,
    PushReceived,
    Refused,
)

FROM_BACKUP = MessageDecoder(Challenge | Accepted | Refused | Expelled | InitialWeightsReceived | PushReceived)
UNREACHABLE_SECONDS = 5.0  # without a connection, after which a backup is reported
DEAD_LINK_SECONDS = 30.0  # until a dead connection is ended
PAUSE = 0.05  # seconds between two attempts to connect


class Backup:
    """The backup of a shard. Any thread may call."""

    def __init__(self, endpoint: Endpoint, generation: str, report: Callable[[str], None]) -> None:
        """report: called once with a reason if the backup cannot be reached."""
        self._endpoint, self._generation, self._report = endpoint, generation, report
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self._ended = threading.Event()
        self._is_reported = False
        self._failing_since: float | None = None

    @property
    def is_expected(self) -> bool:
        """Whether the shard must wait for the backup."""
        return not self._ended.is_set()

    def end(self) -> None:
        """Stop waiting for the backup. Threads that wait for it wake."""
        self._ended.set()
        with self._lock:
            for channel in self._channels:
                channel.cut()

    def connect(self, hello: Hello) -> Channel:
        """Open a connection to the backup on behalf of a worker."""
        channel, generation = self._endpoint.open(FROM_BACKUP)
        try:
            if generation != self._generation:
                raise ConnectionClosed("The backup is of another generation.")
            channel.set_keepalive(DEAD_LINK_SECONDS)
            channel.send(hello)
        except BaseException:
            channel.close()
            raise
        with self._lock:
            self._channels.add(channel)
            self._failing_since = None
            if self._ended.is_set():
                channel.cut()
        return channel

    def disconnect(self, channel: Channel) -> None:
        """Close a connection that `connect` has opened."""
        with self._lock:
            self._channels.discard(channel)
        channel.close()

    def failed(self, error: OSError) -> None:
        """Take note of a failure, and wait for a moment. Report the backup if it fails for too long."""
        now = time.monotonic()
        with self._lock:
            self._failing_since = self._failing_since or now
            is_over = isinstance(error, WireError) or now - self._failing_since > UNREACHABLE_SECONDS
            reports, self._is_reported = is_over and not self._is_reported, self._is_reported or is_over
        if reports and self.is_expected:
            self._report(str(error))
        self._ended.wait(PAUSE)


class Relay:
    """Passes the updates of one worker's connection on to the backup. One thread uses it."""

    def __init__(self, backup: Backup, hello: Hello) -> None:
        self._backup, self._hello = backup, msgspec.structs.replace(hello, codec="")  # the backup sends no weights here
        self._channel: Channel | None = None
        self._message: Any = None
        self._body = memoryview(b"")
        self._passed = -1  # bytes of the body that were passed on over the present connection; -1: not even the head

    def begin(self, message: Any, body: memoryview) -> None:
        """Begin to pass a message on, whose body is still arriving in this buffer."""
        self._message, self._body, self._passed = message, body, -1
        if self._backup.is_expected:
            self._try_to_pass(0)

    def arrived(self, size: int) -> None:
        """Pass on what has arrived of the body: the first `size` bytes of it are there."""
        if self._passed >= 0:
            self._try_to_pass(size)

    def finish(self) -> None:
        """Wait until the backup has the whole message. Return at once if it is no longer expected.

        Raise Fenced if the worker's incarnation is over, and WireError if the backup refuses the message.
        """
        while self._backup.is_expected:
            try:
                self._pass(len(self._body))
                assert self._channel is not None
                answer = self._channel.receive()
            except OSError as error:
                self._lose(error)
                continue
            if isinstance(answer, Expelled):
                raise Fenced
            if isinstance(answer, Refused):
                raise WireError(answer.reason)
            return

    def close(self) -> None:
        """Close the connection to the backup, if there is one."""
        if self._channel:
            self._backup.disconnect(self._channel)
            self._channel = None

    def _try_to_pass(self, size: int) -> None:
        """Pass on the first `size` bytes. If that fails, `finish` passes on everything again."""
        try:
            self._pass(size)
        except OSError as error:
            self._lose(error)

    def _pass(self, size: int) -> None:
        """Pass on the head of the message and the first `size` bytes of its body, as far as they are not passed yet."""
        if self._channel is None:
            self._channel, self._passed = self._backup.connect(self._hello), -1
        if self._passed < 0:
            self._channel.send_head(self._message, len(self._body))
            self._passed = 0
        if size > self._passed:
            self._channel.send_part(self._body[self._passed : size])
            self._passed = size

    def _lose(self, error: OSError) -> None:
        self.close()
        self._passed = -1
        self._backup.failed(error)
