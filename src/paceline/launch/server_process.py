"""The server of a job as a separate process, which is restarted from its last checkpoint if it is killed."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from paceline.launch.processes import JobError, Printer, ending, heard, lines, start, stop
from paceline.model import checkpoint
from paceline.serve.environment import TOKEN
from paceline.serve.job_options import JobOptions
from paceline.serve.serve_job import LISTENING

START_SECONDS = 60.0  # seconds that the server has to start listening


class ServerProcess:
    """A server in its own process."""

    def __init__(self, options: JobOptions, token: bytes, restarts: int, say: Printer) -> None:
        self.options, self._token, self._restarts, self._say = options, token, restarts, say
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._is_listening = asyncio.Event()
        self._last_error = ""  # the last line of its standard error
        self.port = options.port
        self.starts = 0  # how often it was started
        self.over = False  # whether it has ended and will not be started again

    async def start(self) -> None:
        """Start the process, and wait until the server listens."""
        self.starts += 1
        self._is_listening.clear()
        command = [sys.executable, "-m", "paceline.serve"]
        environment = {**os.environ, TOKEN: self._token.hex()}
        options = self._options_now().to_json() + b"\n"
        self._process = await start(command, environment, capture=True, feed=options)
        self._readers = [
            asyncio.create_task(self._read_output(self._process)),
            asyncio.create_task(self._read_errors(self._process)),
        ]
        listening = asyncio.ensure_future(self._is_listening.wait())
        ended = asyncio.ensure_future(self._process.wait())
        await asyncio.wait((listening, ended), timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        ended.cancel()
        if not self._is_listening.is_set():
            await self.stop()
            raise JobError(self._last_error or "The server did not start.", said=bool(self._last_error))

    async def keep(self) -> None:
        """Wait until the server has ended successfully.

        If it is killed, it is restarted at the same address from its last checkpoint.
        """
        assert self._process and self._readers
        while True:
            code = await self._process.wait()
            await heard(self._readers)
            if code == 0:
                self.over = True
                return
            if code > 0 or self._restarts <= 0:  # a server that ends with an error has printed the reason
                raise JobError(self._last_error or f"The server {ending(code)}.", said=bool(self._last_error))
            if self._checkpoint() is None:
                raise JobError(
                    f"The server {ending(code)}, and there is no checkpoint to restart it from; use --checkpoint."
                )
            self._restarts -= 1
            self._say(f"The server {ending(code)}; restarting it from its last checkpoint.", aside=True)
            await self.start()

    async def stop(self, seconds: float = 30.0) -> None:
        """End the server. It has this number of seconds to write a last checkpoint."""
        self.over = True
        if self._process:
            await stop([self._process], seconds)
        if self._readers:
            await heard(self._readers)

    def _checkpoint(self) -> Path | None:
        """Return the folder to restart from: that of this job's checkpoints, or else that of --resume."""
        saving = self.options.saving
        if saving and saving.folder.is_dir() and checkpoint.newest(saving.folder):
            return saving.folder
        return self.options.resume

    def _options_now(self) -> JobOptions:
        """Return the job's options. A restarted server listens on the same port and resumes the last checkpoint."""
        if self.starts == 1:
            return self.options
        return msgspec.structs.replace(self.options, port=self.port, resume=self._checkpoint())

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        async for line in lines(process.stdout):
            if line.startswith(LISTENING):
                self.port = int(line.rstrip(".").rpartition(":")[2])
                self._is_listening.set()

    async def _read_errors(self, process: asyncio.subprocess.Process) -> None:
        async for line in lines(process.stderr):
            self._last_error = line
            self._say(line, aside=True)
