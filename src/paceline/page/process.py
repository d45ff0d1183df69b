"""The page of a running job, in a process of its own that watches the job as `paceline watch` does.

The job's processes never wait for it: the coordinator sends it the events that it sends to every watcher, and it has
a lower priority than the job.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.tls import Tls
from paceline.serve.wire.tokens import token_for

STOP_SECONDS = 5.0  # for the process to give the viewers a last frame, and to end


class PageSetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The facts that the process must know before it listens."""

    title: str = ""
    host: str = ""  # that the user has named
    token: bytes = b""  # viewers on other machines must know it, or the token that it was derived from
    tls: Tls | None = None


class WatchedJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job that the page shows from now on, instead of the one before."""

    endpoint: Endpoint
    floor: float | None = None  # the shortest seconds per iteration under any policy, if they are known


class PageProcess:
    """A page in its own process. It listens from the first job on, and ends with this process."""

    def __init__(
        self,
        listening: socket.socket,
        setup: PageSetup,
        wrap: Callable[[Sequence[str]], Sequence[str]] = lambda command: command,
    ) -> None:
        """listening: where viewers connect. wrap: changes the command line of the process.

        The process gets no token but those for watching, whatever tokens are given here.
        """
        setup = msgspec.structs.replace(setup, token=token_for("watch", setup.token) if setup.token else b"")
        self._listening, self._setup, self._wrap = listening, setup, wrap
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PageProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The number of the process, or 0 if it does not run."""
        return self._process.pid if self._process else 0

    def follow(self, endpoint: Endpoint, floor: float | None = None) -> None:
        """Show the job of this server from now on."""
        if self._process is None:
            self._start()
        self._send(WatchedJob(endpoint=replace(endpoint, token=token_for("watch", endpoint.token)), floor=floor))

    def stop(self) -> None:
        """Give the viewers a last frame, and end the process."""
        self._listening.close()
        if self._process is None or self._process.stdin is None:
            return
        try:
            self._process.stdin.close()
            self._process.wait(STOP_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process = None

    def _start(self) -> None:
        number = self._listening.fileno()
        command = self._wrap([sys.executable, "-m", "paceline.page", str(number)])
        # In a session of its own, the process outlives a Ctrl-C until its viewers have seen the end of the job.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(number,), start_new_session=True
        )
        self._send(self._setup)

    def _send(self, message: msgspec.Struct) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # the page has failed, and has said why; the job goes on without it
