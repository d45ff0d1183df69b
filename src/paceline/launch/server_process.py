"""The server's process: `paceline serve`, started here, watched, and started again from its last checkpoint."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.processes import JobError, Printer, ending, heard, lines, start, stop
from paceline.model import checkpoint
from paceline.serve.environment import TOKEN
from paceline.serve.wire.tls import Tls

LISTENING = "Listening on "
STARTING = 60.0  # seconds that it may take to listen


@dataclass(frozen=True)
class ServeOptions:
    """What `paceline serve` is told."""

    policy: str
    servers: int = 1
    workers: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    apply: str = "whole"
    correct: str = "auto"
    colocate: bool = False  # is there a shard beside each worker, instead of servers?
    lease: float = 30.0
    checkpoint: Path | None = None
    every: str | None = None
    resume: Path | None = None
    record: Path | None = None
    tls: Tls | None = None

    def arguments(self) -> list[str]:
        """As a command line."""
        tls = self.tls or Tls()
        given = {
            "--policy": self.policy,
            "--servers": self.servers,
            "--workers": self.workers,
            "--host": self.host,
            "--port": self.port,
            "--apply": self.apply,
            "--correct": self.correct,
            "--lease": self.lease,
            "--checkpoint": self.checkpoint,
            "--checkpoint-every": self.every,
            "--resume": self.resume,
            "--record-updates": self.record,
            "--tls-cert": tls.cert,
            "--tls-key": tls.key,
            "--tls-ca": tls.ca,
        }
        arguments = [text for name, value in given.items() if value is not None for text in (name, str(value))]
        return [*arguments, "--colocate"] if self.colocate else arguments


class ServerProcess:
    """A server in a process of its own."""

    def __init__(self, options: ServeOptions, token: bytes, restarts: int, say: Printer) -> None:
        self.options, self._token, self._restarts, self._say = options, token, restarts, say
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._last_words = ""
        self.port = options.port
        self.starts = 0  # how often it was started
        self.over = False  # has it ended for good?

    async def start(self) -> None:
        """Start it, and wait until it listens."""
        self.starts += 1
        self._up.clear()
        command = [sys.executable, "-m", "paceline", "serve", "--quiet", *self._arguments()]
        environment = {**os.environ, TOKEN: self._token.hex()}
        self._process = await start(command, environment, capture=True)
        self._listening = asyncio.ensure_future(self._listen(self._process))
        self._complaining = asyncio.ensure_future(self._complain(self._process))
        up = asyncio.ensure_future(self._up.wait())
        ended = asyncio.ensure_future(self._process.wait())
        await asyncio.wait((up, ended), timeout=STARTING, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        ended.cancel()
        if not self._up.is_set():
            await self.stop()
            raise JobError(self._last_words or "The server did not start.", said=bool(self._last_words))

    async def keep(self) -> None:
        """Until it has ended well. Killed, it is started again at the same address from its last checkpoint."""
        assert self._process and self._listening
        while True:
            code = await self._process.wait()
            await heard((self._listening, self._complaining))
            if code == 0:
                self.over = True
                return
            if code > 0 or self._restarts <= 0:  # it said why itself
                raise JobError(self._last_words or f"The server {ending(code)}.", said=bool(self._last_words))
            if self._checkpoint() is None:
                raise JobError(f"The server {ending(code)}; there is no checkpoint to go back to: give --checkpoint.")
            self._restarts -= 1
            self._say(f"The server {ending(code)}; it is started again from its last checkpoint.", aside=True)
            await self.start()

    async def stop(self, seconds: float = 30.0) -> None:
        """End it; it may write a last checkpoint."""
        self.over = True
        if self._process:
            await stop([self._process], seconds)
        if self._listening:
            await heard((self._listening, self._complaining))

    def _checkpoint(self) -> Path | None:
        folder = self.options.checkpoint
        if folder and folder.is_dir() and checkpoint.newest(folder):
            return folder
        return self.options.resume

    def _arguments(self) -> list[str]:
        arguments = self.options.arguments()
        if self.starts > 1:
            resume = self._checkpoint()
            assert resume is not None
            arguments += ["--port", str(self.port), "--resume", str(resume)]  # the last of its kind counts
        return arguments

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        async for line in lines(process.stdout):
            if line.startswith(LISTENING):
                self.port = int(line.rstrip(".").rpartition(":")[2])
                self._up.set()

    async def _complain(self, process: asyncio.subprocess.Process) -> None:
        async for line in lines(process.stderr):
            self._last_words = line
            self._say(line, aside=True)
