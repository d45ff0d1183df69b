"""The server of a job as a separate process, which is restarted from its last checkpoint if it is killed."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from paceline.launch.processes import JobError, Printer, ending, heard, lines, start, stop
from paceline.model import checkpoint
from paceline.model.checkpoint import CheckpointError
from paceline.serve.environment import TOKEN
from paceline.serve.job_options import JobOptions
from paceline.serve.last_save import UNSAVED
from paceline.serve.restarts import RestartBudget
from paceline.serve.serve_job import LISTENING

STOP_SECONDS = 30.0  # seconds that the server has to write a last checkpoint, besides its patience if that fails
START_SECONDS = 60.0  # seconds that the server has to start listening


class ServerProcess:
    """A server in its own process."""

    def __init__(
        self,
        options: JobOptions,
        token: bytes,
        say: Printer,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """environment: variables for the server and its shards, besides those of this process."""
        self._environment = environment or {}
        self.options, self._token, self._say = options, token, say
        self._restarts = RestartBudget(options.restarts)
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._is_listening = asyncio.Event()
        self._last_error = ""  # the last line of its standard error
        self.port = options.port
        self.has_listened = False  # whether it has listened once
        self.is_used = False  # whether workers were started, so that a restart needs a checkpoint
        self.over = False  # whether it has ended and will not be started again

    async def start(self) -> None:
        """Start the process, and wait until the server listens. If it is killed before that, start it again."""
        while failure := await self._try_to_start():
            self._prepare_restart(failure)

    async def keep(self) -> None:
        """Wait until the server has ended successfully.

        If it is killed, it is restarted at the same address from its last checkpoint.
        """
        while True:
            assert self._process is not None
            code = await self._process.wait()
            await heard(self._readers)
            if code == 0:
                self.over = True
                return
            self._prepare_restart(self._how_it_was_killed(code))
            await self.start()

    async def _try_to_start(self) -> str:
        """Start the process. Return "" when it listens, or else the end of a sentence that says how it failed."""
        self._is_listening.clear()
        self._last_error = ""
        command = [sys.executable, "-m", "paceline.serve"]
        environment = {**os.environ, **self._environment, TOKEN: self._token.hex()}
        options = self._options_now().to_json() + b"\n"
        self._process = process = await start(command, environment, capture=True, feed=options)
        self._readers = [
            asyncio.create_task(self._read_output(process)),
            asyncio.create_task(self._read_errors(process)),
        ]
        listening = asyncio.ensure_future(self._is_listening.wait())
        ended = asyncio.ensure_future(process.wait())
        await asyncio.wait((listening, ended), timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        ended.cancel()
        if self._is_listening.is_set():
            return ""
        code = process.returncode
        await stop([process])
        await heard(self._readers)
        return f"did not listen within {START_SECONDS:g} s" if code is None else self._how_it_was_killed(code)

    def _how_it_was_killed(self, code: int) -> str:
        """Return how the process ended. Raise JobError if it ended with an error, which a restart cannot fix."""
        if code >= 0:  # it has printed the reason
            raise self.failure(code)
        return ending(code)

    def _prepare_restart(self, failure: str) -> None:
        """Say that the server is restarted. Raise JobError if it was restarted too often, or has no checkpoint."""
        if self.is_used and self._checkpoint() is None:
            raise JobError(f"The server {failure}, and there is no checkpoint to restart it from; use --checkpoint.")
        if not self._restarts.spend(time.monotonic()):
            resume = f", and continue the job with --resume {folder}" if (folder := self._checkpoint()) else ""
            before = f" after it was restarted {self._restarts.used}"
            raise JobError(f"The server {failure}{before}; allow more restarts with --restarts{resume}.")
        where = "restarting it from its last checkpoint" if self.is_used else "starting it again"
        self._say(f"The server {failure}; {where}.", aside=True)

    def failure(self, code: int) -> JobError:
        """Return the error of a server that has ended with this exit code. It has printed the reason."""
        said = bool(self._last_error)
        return JobError(self._last_error or f"The server {ending(code)}.", said, UNSAVED if code == UNSAVED else 1)

    @property
    def is_unsaved(self) -> bool:
        """Whether the server has ended, and could not write its last checkpoint."""
        return self._process is not None and self._process.returncode == UNSAVED

    async def stop(self, again: asyncio.Event | None = None) -> None:
        """End the server. It may need some time to write a last checkpoint. again: the user insists on the end."""
        self.over = True
        if self._process:
            patience = self.options.saving.patience if self.options.saving else 0.0
            stopping = asyncio.ensure_future(stop([self._process], STOP_SECONDS + patience))
            insisting = asyncio.ensure_future((again or asyncio.Event()).wait())
            await asyncio.wait((stopping, insisting), return_when=asyncio.FIRST_COMPLETED)
            if not stopping.done():
                await stop([self._process], STOP_SECONDS)
            await stopping
            insisting.cancel()
        if self._readers:
            await heard(self._readers)

    def _checkpoint(self) -> Path | None:
        """Return the folder to restart from: that of this job's checkpoints, or else that of --resume."""
        saving, resume = self.options.saving, self.options.resume
        found = checkpoint.newest(saving.folder, quick=True) if saving else None
        if not saving or not found:
            return resume
        try:
            first = checkpoint.read(resume, quick=True).version if resume else 0
        except CheckpointError:
            first = 0
        return saving.folder if found.version >= first else resume

    def _options_now(self) -> JobOptions:
        """Return the job's options. A restarted server listens on the same port and resumes the last checkpoint."""
        if not self.has_listened:
            return self.options
        return msgspec.structs.replace(self.options, port=self.port, resume=self._checkpoint())

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        async for line in lines(process.stdout):
            if line.text.startswith(LISTENING):
                where = line.text.removeprefix(LISTENING).partition(", ")[0]  # a fingerprint may follow
                self.port = int(where.rstrip(".").rpartition(":")[2])
                self.has_listened = True
                self._is_listening.set()

    async def _read_errors(self, process: asyncio.subprocess.Process) -> None:
        async for line in lines(process.stderr):
            self._last_error = line.text
            self._say(line.text, aside=True)
