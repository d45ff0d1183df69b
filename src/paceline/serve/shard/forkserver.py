"""A fork server: a process that has torch loaded, and forks the shards of one server.

It takes a process about two seconds to import torch. The fork server does it once. After that a shard starts in
milliseconds: the second shard of a server does, and so does every shard of a new generation.

The fork server starts no thread and computes nothing, so a shard may start threads and compute as it likes. A shard
ends as if it had been started by itself, and the server is told its exit code. If the fork server is killed, its shards
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

#: Where a process that has loaded torch may fork without harm, and where its children can be made to die with it.
POSSIBLE = sys.platform.startswith("linux")
#: How the fork server and its shards are called in lists of processes, whose command lines are the same.
NAME, SHARD_NAME = "fork server", "shard {}"
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


class ShardProcess(Protocol):
    """The process of a shard, as the server sees it. subprocess.Popen is one too."""

    returncode: Any  # None while it runs; a signal that killed it is a negative number

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class ForkServer:
    """The server's side of it. Shards can be asked for at once; they start when torch is loaded."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """environment: the variables of the fork server, and of every shard."""
        self._link, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "paceline.serve.shard.forkserver", str(theirs.fileno())]
            # In a session of its own, so that a Ctrl-C reaches the coordinator first, which then stops the shards.
            self._process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self._numbers = itertools.count()
        self._codes: dict[int, int] = {}  # the exit codes of shards that have ended
        self._unread = b""
        self._loaded = False  # is torch?
        self.ended = False

    def start(self, arguments: Sequence[str]) -> ForkedShard:
        """Start a shard with these arguments, those of `python -m paceline.serve.shard`."""
        number = next(self._numbers)
        self._ask({"start": number, "arguments": list(arguments)})
        return ForkedShard(self, number)

    def close(self) -> None:
        """End the fork server. Its shards must have ended."""
        self._link.close()
        self._process.wait()
        self.ended = True

    def exit_code(self, number: int, seconds: float | None = 0.0) -> int | None:
        """The exit code of a shard, if it ends within some seconds. If the fork server has ended, it is that one's."""
        until = None if seconds is None else time.monotonic() + seconds
        while number not in self._codes and not self.ended:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._link], [], [], left)[0]:
                return None
            self._hear()
        if number not in self._codes:
            self._codes[number] = self._process.wait()
        return self._codes[number]

    def kill(self, number: int) -> None:
        """Kill a shard. Before torch is loaded there is none, and the fork server is killed."""
        if self._loaded:
            self._ask({"kill": number})
        else:
            self._process.kill()

    def _ask(self, what: Mapping[str, object]) -> None:
        with contextlib.suppress(OSError):  # if the fork server has been killed, `exit_code` says so
            self._link.sendall(json.dumps(what).encode() + b"\n")

    def _hear(self) -> None:
        data = _received(self._link)
        self.ended = not data
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._loaded = True
            said = json.loads(line)
            if "ended" in said:
                self._codes[said["ended"]] = said["code"]


class ForkedShard:
    """A shard's process."""

    def __init__(self, server: ForkServer, number: int) -> None:
        self._server, self._number = server, number
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.returncode = self._server.exit_code(self._number)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self.returncode = self._server.exit_code(self._number, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a shard", timeout or 0.0)
        return self.returncode

    def kill(self) -> None:
        self._server.kill(self._number)


# The fork server's own side


def main() -> None:
    """`python -m paceline.serve.shard.forkserver SOCKET`.

    It ends when the other end is closed and the shards have ended.
    """
    link = socket.socket(fileno=int(sys.argv[1]))
    call_this_process(NAME)
    from paceline.serve.shard import shard

    gc.collect()
    gc.freeze()  # so that no shard copies what all of them share, only to look whether it is still needed
    arguments = _serve(link)
    if arguments is not None:
        sys.argv[1:] = arguments
        shard.main()


def _serve(link: socket.socket) -> list[str] | None:
    """Fork shards. Returns in each of them, with its arguments; and None in the fork server, at its end."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    running: dict[int, int] = {}  # process → shard
    unread, listening, this = b"", True, os.getpid()
    _tell(link, {"loaded": True})
    while listening or running:
        sources: list[Any] = [woken, link] if listening else [woken]
        ready, _, _ = select.select(sources, [], [])
        if woken in ready:
            os.read(woken, 4096)
            for number, code in _ended(running):
                _tell(link, {"ended": number, "code": code})
        if link not in ready:
            continue
        data = _received(link)
        listening = bool(data)
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            asked = json.loads(line)
            if "kill" in asked:
                for process in [process for process, number in running.items() if number == asked["kill"]]:
                    os.kill(process, signal.SIGKILL)
                continue
            process = os.fork()
            if process == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(woken)
                os.close(wake)
                link.close()
                _begin(asked["arguments"][0], this)
                return list(asked["arguments"])
            running[process] = asked["start"]
    return None


def _begin(number: str, parent: int) -> None:
    """Give the process of a shard a session and a name of its own, and have it die with the fork server."""
    os.setsid()
    call_this_process(SHARD_NAME.format(number))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has died already
        os.kill(os.getpid(), signal.SIGKILL)


def _ended(running: dict[int, int]) -> Iterator[tuple[int, int]]:
    """The shards that have ended, and their exit codes."""
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == 0:
            return
        yield running.pop(process), os.waitstatus_to_exitcode(status)


def _received(link: socket.socket) -> bytes:
    """What has come, or nothing if the other end is closed."""
    try:
        return link.recv(1 << 16)
    except ConnectionError:
        return b""


def _tell(link: socket.socket, what: Mapping[str, object]) -> None:
    with contextlib.suppress(OSError):  # the server may be gone
        link.sendall(json.dumps(what).encode() + b"\n")


def call_this_process(name: str) -> None:
    """Name this process in lists of processes; the kernel takes 15 characters."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


if __name__ == "__main__":
    main()
