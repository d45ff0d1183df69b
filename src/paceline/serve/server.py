"""A complete parameter server on this machine: the coordinator in this process, and each shard in a process of its own.

A server runs in generations. If a shard is lost, the server stops all shards, and a new generation begins at the same
address from the last checkpoint. Workers reconnect by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.model import checkpoint
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.observe.observer import Observer
from paceline.policies import Policy
from paceline.serve import open_files
from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan
from paceline.serve.coordinator.config import ServerConfig
from paceline.serve.coordinator.coordinator import Coordinator
from paceline.serve.environment import SHARD_TOKEN, TOKEN
from paceline.serve.shard import forkserver
from paceline.serve.shard.forkserver import ForkServer, ShardProcess
from paceline.serve.wire.tls import Tls

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0  # for a shard to stop before it is killed


class ServerError(RuntimeError):
    """A server cannot start or continue. The message says what to do."""


@dataclass(frozen=True)
class Address:
    """The address that a server listens on. Any address but loopback needs a token, so that only the job's own join."""

    host: str = "127.0.0.1"
    port: int = 0

    def check(self, token: bytes) -> None:
        """Raise ServerError if this address needs a token and there is none."""
        if not token and not (self.host in ("localhost", "::1") or self.host.startswith("127.")):
            raise ServerError(
                f"Listening on {self.host} needs a token, so that strangers cannot join: "
                f"give --token-file, or set {TOKEN}."
            )


class Server:
    """Serves one job, one generation after another."""

    def __init__(
        self,
        make_policy: Callable[[], Policy],
        config: ServerConfig,
        address: Address | None = None,
        *,
        tls: Tls | None = None,
        observer: Observer | None = None,
        resume: Path | None = None,
        restorations: int = 3,
        own_shards: bool = True,
    ) -> None:
        """resume: a checkpoint to begin from. restorations: how often the server recovers from a lost shard.

        own_shards: start the shards here? Otherwise they are started elsewhere, and use the job's token.
        """
        self._address = address or Address()
        self._address.check(config.token)
        if (allowed := open_files.allow(config.workers)) < config.workers:
            raise ServerError(
                f"{config.workers} workers need as many open files, but the system allows {allowed}: "
                "raise `ulimit -Hn`."
            )
        made = make_policy()
        if made.compares and made.mixes:
            raise ServerError(
                "Updates cannot be compared if workers push whole models: leave moves=model out, or set filter=false."
            )
        if config.record and config.streams(made):
            instead = "leave pipeline=true out" if made.pipelined else "leave --apply at whole"
            raise ServerError(f"Streamed updates cannot be recorded yet: {instead}.")
        self._make_policy, self._observer, self._tls = make_policy, observer, tls
        began = time.monotonic()
        self._own_shards = own_shards
        shard_token = secrets.token_bytes(16) if own_shards else b""
        self._config = replace(config, began=began, tls=tls.listening() if tls else None, shard_token=shard_token)
        self._restored = self._check_shard_count(checkpoint.read(resume)) if resume else None
        if config.saving and config.saving.folder.is_dir():
            self._check_folder(config.saving.folder)
        self._restorations = restorations
        self._processes: list[ShardProcess] = []
        self._forks: ForkServer | None = None
        self.coordinator: Coordinator
        self.port = 0

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Begin to listen, and start the shards. `port` is known then."""
        self.coordinator = Coordinator(self._make_policy(), self._config, self._observer, self._restored)
        try:
            self.port = await self.coordinator.listen(self._address.host, self.port or self._address.port)
        except OSError as error:
            where = f"{self._address.host}:{self.port or self._address.port}"
            raise ServerError(f"Cannot listen on {where}: {error.strerror}; choose another --port.") from None
        if self._observer:
            self._observer.began(self.coordinator.now, "", self._config.policy, self.coordinator.apply, 0)
        if not self._own_shards:
            return
        # The shards share the cores of this machine.
        threads = max(1, (os.cpu_count() or 1) // max(1, self._config.shards))
        self._processes = [self._start_shard(number, threads) for number in range(self._config.shards)]

    async def serve(self) -> None:
        """Serve until all workers have left. Then write a last checkpoint."""
        while True:
            if await self._wait_for_end():
                await self.coordinator.save()
                if self.coordinator.faults:
                    log.warning("%d connections were refused.", self.coordinator.faults)
                if not self.coordinator.failed.is_set():
                    return  # otherwise a shard was lost while it saved: go back to the checkpoint before
            reason, failure_is_permanent = self.coordinator.reason, self.coordinator.failure_is_permanent
            expected = self.coordinator.state.roster.expected
            await self._end_generation()
            restored = self._newest_checkpoint()
            if failure_is_permanent:
                raise ServerError(reason)
            if restored is None:
                raise ServerError(f"{reason} There is no checkpoint to go back to; give --checkpoint FOLDER.")
            if self._restorations <= 0:
                raise ServerError(f"{reason} That has happened too often. Continue the job with --resume.")
            self._restorations -= 1
            log.warning("%s Going back to version %d.", reason, restored.version)
            self._restored = restored
            self._config = replace(
                self._config, incarnations=dict(self.coordinator.state.incarnations), awaited=expected
            )
            await self.start()

    async def stop(self) -> None:
        """Stop the coordinator, the shards and the fork server."""
        await self._end_generation()
        if self._forks:
            await asyncio.to_thread(self._forks.close)
            self._forks = None

    async def _end_generation(self) -> None:
        """Stop the coordinator and the shards."""
        await self.coordinator.close()
        for process in self._processes:
            await asyncio.to_thread(_stop, process)
        self._processes = []

    async def _wait_for_end(self) -> bool:
        """Wait for the end of this generation. Return True if the job is done, False if the generation has failed."""
        done, failed = (
            asyncio.ensure_future(event.wait()) for event in (self.coordinator.done, self.coordinator.failed)
        )
        shard_ended = asyncio.ensure_future(self._watch_shards())
        try:
            await asyncio.wait((done, failed, shard_ended), return_when=asyncio.FIRST_COMPLETED)
            return self.coordinator.done.is_set() and not self.coordinator.failed.is_set()
        finally:
            for waiting in (done, failed, shard_ended):
                waiting.cancel()

    async def _watch_shards(self) -> None:
        """Fail the generation if the process of a shard ends, even before it has connected."""
        while True:
            for number, process in enumerate(self._processes):
                if process.poll() is not None:
                    ending = _describe_exit(process.returncode)
                    await asyncio.sleep(0.2)  # a ShardFailed with a better reason may still arrive
                    self.coordinator.fail(f"Shard {number} {ending}.")
                    return
            await asyncio.sleep(0.2)

    def _newest_checkpoint(self) -> Checkpoint | None:
        """Return the newest checkpoint of this job, or the one that it began from."""
        saving: CheckpointPlan | None = self._config.saving
        found = checkpoint.newest(saving.folder) if saving and saving.folder.is_dir() else None
        return self._check_shard_count(found) if found else self._restored

    def _check_folder(self, folder: Path) -> None:
        """Raise CheckpointError if the folder has checkpoints of another run, to keep two runs apart."""
        old = checkpoint.newest(folder)
        if old and (self._restored is None or self._restored.version < old.version):
            raise CheckpointError(
                f"{folder} has checkpoints of an earlier run: continue it with --resume {folder}, "
                "or name another folder."
            )

    def _check_shard_count(self, restored: Checkpoint) -> Checkpoint:
        """Return the checkpoint. Raise CheckpointError if it has another number of shards than this server."""
        if restored.shards != self._config.shards:
            raise CheckpointError(
                f"The checkpoint {restored.folder} is of {restored.shards} shards: use --servers {restored.shards}."
            )
        return restored

    def _start_shard(self, number: int, threads: int) -> ShardProcess:
        """Start the process of a shard, by the fork server if the system allows one."""
        host = {"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "::": "::1"}.get(
            self._address.host, self._address.host
        )
        arguments = [str(number), host, str(self.port), "--listen", self._address.host, "--threads", str(threads)]
        environment = os.environ | (self._tls.as_environment() if self._tls else {})
        environment |= {TOKEN: self._config.token.hex(), SHARD_TOKEN: self._config.shard_token.hex()}
        if not forkserver.IS_SUPPORTED:
            command = [sys.executable, "-m", "paceline.serve.shard", *arguments]
            # In a session of its own, so that Ctrl-C reaches only the coordinator, which then stops the shards.
            return subprocess.Popen(command, env=environment, start_new_session=True)
        if self._forks is None or self._forks.ended:
            self._forks = ForkServer(environment)
        return self._forks.start(arguments)


def _describe_exit(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _stop(process: ShardProcess) -> None:
    """Wait for a shard's process to end. Kill it if that takes too long."""
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
