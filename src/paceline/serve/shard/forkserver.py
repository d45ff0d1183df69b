"""A fork server: a process that has loaded torch, and forks the shards of one server.

A process takes about two seconds to import torch. The fork server imports it once. Then every shard starts in
milliseconds, also the shards of a new generation.

The fork server starts no thread and computes nothing, so it can fork safely. A shard ends like a process that was
started on its own, and the fork server reports its exit code to the server. If the fork server is killed, its shards
are killed with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

#: Whether a process that has loaded torch can fork safely here, and have its children die with it.
IS_SUPPORTED = sys.platform.startswith("linux")
#: The names of the fork server and its shards in process lists. Their command lines are the same.
NAME, SHARD_NAME = "fork server", "shard {}"
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


class ShardProcess(Protocol):
    """The process of a shard, as the server uses it. A subprocess.Popen is one too."""

    returncode: Any  # None while the process runs; negative if a signal has killed it

    def poll(self) -> int | None:
        """Return the exit code if the process has ended, else None."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end, and return its exit code. Raise subprocess.TimeoutExpired after `timeout`."""

    def kill(self) -> None:
        """Kill the process."""


class ForkServer:
    """The server's handle of the fork server. `start` may be called at once; shards start when torch is loaded."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """environment: the environment variables of the fork server and of every shard."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "paceline.serve.shard.forkserver", str(theirs.fileno())]
            # It gets its own session, so that Ctrl-C reaches only the coordinator, which then stops the shards.
            self._process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self._numbers = itertools.count()
        self._codes: dict[int, int] = {}  # shard → its exit code, once it has ended
        self._unread = b""  # the beginning of a line that has not arrived whole
        self._is_ready = False  # has the fork server loaded torch?
        self.ended = False  # has the fork server ended?

    def start(self, arguments: Sequence[str]) -> ForkedShard:
        """Start a shard with the arguments of `python -m paceline.serve.shard`."""
        number = next(self._numbers)
        self._send({"start": number, "arguments": list(arguments)})
        return ForkedShard(self, number)

    def close(self) -> None:
        """End the fork server, after its shards have ended."""
        self._socket.close()
        self._process.wait()
        self.ended = True

    def exit_code(self, number: int, seconds: float | None = 0.0) -> int | None:
        """Return the exit code of a shard, or None if it does not end within `seconds`.

        If the fork server has ended, return the fork server's own exit code.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while number not in self._codes and not self.ended:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._socket], [], [], left)[0]:
                return None
            self._receive()
        if number not in self._codes:
            self._codes[number] = self._process.wait()
        return self._codes[number]

    def kill(self, number: int) -> None:
        """Kill a shard. Before torch is loaded no shard exists, so kill the fork server."""
        if self._is_ready:
            self._send({"kill": number})
        else:
            self._process.kill()

    def _send(self, request: Mapping[str, object]) -> None:
        _send_line(self._socket, request)  # if the fork server was killed, `exit_code` reports it

    def _receive(self) -> None:
        data = _receive_some(self._socket)
        self.ended = not data
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._is_ready = True
            report = json.loads(line)
            if "ended" in report:
                self._codes[report["ended"]] = report["code"]


class ForkedShard:
    """The process of a shard that the fork server has started."""

    def __init__(self, server: ForkServer, number: int) -> None:
        self._server, self._number = server, number
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code if the shard has ended, else None."""
        self.returncode = self._server.exit_code(self._number)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the shard to end, and return its exit code. Raise subprocess.TimeoutExpired after `timeout`."""
        self.returncode = self._server.exit_code(self._number, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a shard", timeout or 0.0)
        return self.returncode

    def kill(self) -> None:
        """Kill the shard."""
        self._server.kill(self._number)


# The process of the fork server


def main() -> None:
    """Run `python -m paceline.serve.shard.forkserver SOCKET` until the server closes the socket and all shards end."""
    server = socket.socket(fileno=int(sys.argv[1]))
    name_process(NAME)
    from paceline.serve.shard import shard

    gc.collect()
    gc.freeze()  # the garbage collector of a shard would otherwise copy the memory that all shards share
    arguments = _serve(server)
    if arguments is not None:
        sys.argv[1:] = arguments
        shard.main()


def _serve(server: socket.socket) -> list[str] | None:
    """Fork shards. Return the arguments in the process of each shard, and None in the fork server when it ends."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    running: dict[int, int] = {}  # process id → number of the shard
    unread, listening, own_pid = b"", True, os.getpid()
    _send_line(server, {"loaded": True})
    while listening or running:
        sources: list[Any] = [woken, server] if listening else [woken]
        ready, _, _ = select.select(sources, [], [])
        if woken in ready:
            os.read(woken, 4096)
            for number, code in _reap(running):
                _send_line(server, {"ended": number, "code": code})
        if server not in ready:
            continue
        data = _receive_some(server)
        listening = bool(data)
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "kill" in request:
                for pid in [pid for pid, number in running.items() if number == request["kill"]]:
                    os.kill(pid, signal.SIGKILL)
                continue
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(woken)
                os.close(wake)
                server.close()
                _detach_shard(request["arguments"][0], own_pid)
                return list(request["arguments"])
            running[pid] = request["start"]
    return None


def _detach_shard(number: str, parent: int) -> None:
    """Give the process of a shard its own session and name, and make it die with the fork server."""
    os.setsid()
    name_process(SHARD_NAME.format(number))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the fork server has died already
        os.kill(os.getpid(), signal.SIGKILL)


def _reap(running: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the number and the exit code of each shard that has ended."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        yield running.pop(pid), os.waitstatus_to_exitcode(status)


def _receive_some(peer: socket.socket) -> bytes:
    """Return the bytes that have arrived, or none if the peer has closed the socket."""
    try:
        return peer.recv(1 << 16)
    except ConnectionError:
        return b""


def _send_line(peer: socket.socket, message: Mapping[str, object]) -> None:
    """Send a message as a line of JSON. Do nothing if the peer is gone."""
    with contextlib.suppress(OSError):
        peer.sendall(json.dumps(message).encode() + b"\n")


def name_process(name: str) -> None:
    """Name this process in process lists. The kernel keeps 15 characters."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


if __name__ == "__main__":
    main()
