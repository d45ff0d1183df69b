"""A complete parameter server on this machine: the coordinator in this process, and each shard in a process of its own.

A server runs in generations. If a shard is lost, the server stops all shards, and a new generation begins at the same
address from the last checkpoint. Workers reconnect by themselves.
"""

from __future__ import annotations

import asyncio
import itertools
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

from paceline.model.checkpoint import Checkpoint
from paceline.model.codecs import codec
from paceline.observe.observer import Observer
from paceline.policies import Policy
from paceline.serve import cores, open_files
from paceline.serve.coordinator.config import ServerConfig
from paceline.serve.coordinator.coordinator import Coordinator
from paceline.serve.environment import REFUSALS, SHARD_TOKEN, TOKEN
from paceline.serve.last_save import LastSave
from paceline.serve.restarts import DEFAULT_RESTARTS, RestartBudget, RestartLimit
from paceline.serve.restoration import Restoration
from paceline.serve.shard import forkserver
from paceline.serve.shard.forkserver import ForkServer, ShardProcess
from paceline.serve.wire.certificates import fingerprint
from paceline.serve.wire.endpoint import is_loopback
from paceline.serve.wire.tls import Tls, shown_certificate
from paceline.serve.wire.tokens import token_for

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0  # for a shard to stop before it is killed


class ServerError(RuntimeError):
    """A server cannot start or continue. The message says what to do."""


@dataclass(frozen=True)
class Address:
    """The address that a server listens on.

    Any address but loopback needs a token, so that only the job's own join, and TLS, so that the network can neither
    read nor change what they send.
    """

    host: str = "127.0.0.1"
    port: int = 0
    insecure: bool = False  # whether the operator has said that the network is safe without TLS

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine can reach the address."""
        return is_loopback(self.host)

    def check(self, token: bytes, tls: Tls | None) -> None:
        """Raise ServerError if this address needs a token or TLS and there is none."""
        if self.is_loopback:
            return
        if not token:
            raise ServerError(
                f"Listening on {self.host} needs a token, so that strangers cannot join: "
                f"give --token-file, or set {TOKEN}."
            )
        if not tls and not self.insecure:
            raise ServerError(
                f"Listening on {self.host} without TLS lets the network read and change the job: "
                "give --tls auto, or --insecure if nobody else can reach this network."
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
        restarts: RestartLimit = DEFAULT_RESTARTS,
        own_shards: bool = True,
    ) -> None:
        """resume: a checkpoint to begin from. restarts: how often the server recovers from a lost shard.

        own_shards: start the shards here? Otherwise they are started elsewhere, with the job's token for shards.
        """
        self._address = address or Address()
        self._address.check(config.token, tls)
        try:
            token_for("", config.token)
        except ValueError as error:
            raise ServerError(str(error)) from None
        if (allowed := open_files.allow(config.workers)) < config.workers:
            raise ServerError(
                f"{config.workers} workers need as many open files, but the system allows {allowed}: "
                "raise `ulimit -Hn`."
            )
        made = make_policy()
        if config.replicas:
            _check_replicas(config, made)
        if config.max_norm is not None:
            _check_max_norm(config, made)
        if config.update_codec:
            _check_updates(config, made)
        if config.record and config.streams(made):
            raise ServerError(f"Streamed updates cannot be recorded yet: {_how_to_apply_whole(made)}.")
        self._make_policy, self._observer, self._tls = make_policy, observer, tls.serving() if tls else None
        began = time.monotonic()
        self._own_shards = own_shards
        shard_token = secrets.token_bytes(16) if own_shards else b""
        self._config = replace(config, began=began, tls=tls.listening() if tls else None, shard_token=shard_token)
        self._restoration = Restoration(config.shards, config.saving.folder if config.saving else None, resume)
        self._restored = self._restoration.first
        self._last_save = LastSave(config.saving.patience if config.saving else 0.0)
        self._restarts = RestartBudget(restarts)
        self._processes: dict[tuple[int, int], ShardProcess] = {}  # by shard and replica
        self._forks: ForkServer | None = None
        self.coordinator: Coordinator
        self.port = 0

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the server's certificate; empty without TLS."""
        digest = shown_certificate(self._config.tls)
        return fingerprint(digest) if digest else ""

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Begin to listen, and start the shards. `port` is known then."""
        if self._tls:
            self._tls.check_serving()  # at each start: a certificate may have expired since the one before
        self.coordinator = Coordinator(self._make_policy(), self._config, self._observer, self._restored)
        try:
            self.port = await self.coordinator.listen(self._address.host, self.port or self._address.port)
        except OSError as error:
            where = f"{self._address.host}:{self.port or self._address.port}"
            raise ServerError(f"Cannot listen on {where}: {error.strerror}; choose another --port.") from None
        self._restoration.begin()
        if self._observer:
            self._observer.began(self.coordinator.now, "", self._config.policy, self.coordinator.apply, 0)
            self.coordinator.state.introduce(self._observer)
        if not self._own_shards:
            return
        threads = cores.shared_by_shards(self._config.shards, os.environ)
        places = itertools.product(range(1 + self._config.replicas), range(self._config.shards))
        self._processes = {(number, replica): self._start_shard(number, threads, replica) for replica, number in places}

    async def serve(self) -> bool:
        """Serve until all workers have left. Then write a last checkpoint. Return False if it cannot be written."""
        while True:
            if await self._wait_for_end():
                is_saved = await self.save()
                if self.coordinator.faults:
                    logging.getLogger(REFUSALS).warning("Refused connections: %d.", self.coordinator.faults)
                if not self.coordinator.failed.is_set():
                    return is_saved  # otherwise a shard was lost while it saved: go back to the checkpoint before
            reason, shards, again = self.coordinator.reason, self.coordinator.shards, self.coordinator.again
            expected = self.coordinator.state.roster.expected
            may_begin_afresh = not self.coordinator.state.joined_ever and await self._was_shard_killed()
            await self._end_generation()
            if again:
                await self._start_generation(Checkpoint(Path(), again.snapshot), expected, again.provider)
                continue
            if shards.failure_is_permanent:
                raise ServerError(reason)
            if shards.found_damage and self._restored:
                self._restoration.reject(self._restored, reason)
            restored = await asyncio.to_thread(self._restoration.newest, self._config.provider is not None)
            if restored is None and not may_begin_afresh:
                raise ServerError(f"{reason} There is no checkpoint to go back to; give --checkpoint FOLDER.")
            if not (shards.found_damage or self._restarts.spend(time.monotonic())):
                folder = f" {self._config.saving.folder}" if self._config.saving else ""
                resume = f", and continue the job with --resume{folder}" if restored else ""
                used = self._restarts.used
                raise ServerError(f"{reason} Shards were restarted {used} before; allow more with --restarts{resume}.")
            where = f"Going back to version {restored.version}" if restored else "Beginning again"
            log.warning("%s %s.", reason, where)
            await self._start_generation(restored, expected if restored else None)

    async def save(self) -> bool:
        """Write a last checkpoint. Return False if it cannot be written, and the time for that is over."""
        return await self._last_save.run(self.coordinator)

    def give_up(self, ahead: bool = False) -> bool:
        """Give the model up if its last checkpoint has failed. Return False if it has not. ahead: as in LastSave."""
        return self._last_save.give_up(ahead)

    async def _start_generation(
        self, restored: Checkpoint | None, awaited: frozenset[int] | None, provider: int | None = None
    ) -> None:
        """Start a new generation from a checkpoint, or, with a provider, from the weights that this worker provides.

        Without a checkpoint the job begins from its beginning. No worker may have trained yet.
        """
        self._restored = restored
        incarnations = dict(self.coordinator.state.incarnations)
        self._config = replace(self._config, incarnations=incarnations, awaited=awaited, provider=provider)
        await self.start()

    async def stop(self) -> None:
        """Stop the coordinator, the shards and the fork server."""
        await self._end_generation(is_over=True)
        if self._forks:
            await asyncio.to_thread(self._forks.close)
            self._forks = None

    async def _end_generation(self, is_over: bool = False) -> None:
        """Stop the coordinator and the shards. is_over: no other generation follows."""
        await self.coordinator.close(is_over)
        for process in self._processes.values():
            await asyncio.to_thread(_stop, process)
        self._processes = {}

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
        """Give a shard up if its process ends, even before it has connected."""
        watched = dict(self._processes)
        while not self.coordinator.failed.is_set():
            for (number, replica), process in list(watched.items()):
                if process.poll() is not None:
                    del watched[number, replica]
                    ending = _describe_exit(process.returncode)
                    await asyncio.sleep(0.2)  # a ShardFailed with a better reason may still arrive
                    self.coordinator.shards.lose(number, f"Shard {number} {ending}.", replica)
            await asyncio.sleep(0.2)

    async def _was_shard_killed(self) -> bool:
        """Return whether a signal has ended the process of a shard. A shard that ends by itself would do so again."""
        for _ in range(10):  # its connection may end before its exit code is known
            codes = [code for process in self._processes.values() if (code := process.poll()) is not None]
            if codes:
                return min(codes) < 0
            await asyncio.sleep(0.1)
        return not self._own_shards

    def _start_shard(self, number: int, threads: int, replica: int) -> ShardProcess:
        """Start the process of a shard, by the fork server if the system allows one."""
        host = {"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "::": "::1"}.get(
            self._address.host, self._address.host
        )
        arguments = [str(number), host, str(self.port), "--listen", self._address.host, "--threads", str(threads)]
        arguments += ["--replica", str(replica)]
        environment = os.environ | (self._tls.as_environment() if self._tls else {})
        token = token_for("worker", self._config.token)  # a shard needs no more, besides its own
        environment |= {TOKEN: token.hex(), SHARD_TOKEN: self._config.shard_token.hex()}
        if not forkserver.IS_SUPPORTED:
            command = [sys.executable, "-m", "paceline.serve.shard", *arguments]
            # In a session of its own, so that Ctrl-C reaches only the coordinator, which then stops the shards.
            return subprocess.Popen(command, env=environment, start_new_session=True)
        if self._forks is None or self._forks.ended:
            self._forks = ForkServer(environment)
        return self._forks.start(arguments)


def _how_to_apply_whole(policy: Policy) -> str:
    """Say which option makes a policy apply whole updates."""
    return "leave pipeline=true out" if policy.pipelined else "leave --apply at whole"


def _check_replicas(config: ServerConfig, policy: Policy) -> None:
    """Raise ServerError if the shards of this job cannot have backups."""
    if config.streams(policy):
        instead = _how_to_apply_whole(policy)
        raise ServerError(f"Streamed updates cannot be replicated yet: {instead}, or leave --replicas out.")
    if config.record:
        raise ServerError("A job with --replicas cannot be recorded yet: leave --record-updates out.")
    if not config.shards:
        raise ServerError("--replicas needs shards to replicate: give --servers 1 or more.")


def _check_max_norm(config: ServerConfig, policy: Policy) -> None:
    """Raise ServerError if the updates of this job cannot be clipped."""
    if config.streams(policy):
        raise ServerError(
            "--max-norm compares whole updates, and streamed ones are applied before they are whole: "
            f"{_how_to_apply_whole(policy)}, or leave --max-norm out."
        )
    if policy.mixes:
        raise ServerError(
            "--max-norm compares gradients, and workers push whole models under this policy: leave it out, "
            "and use the policy's own filter."
        )
    if not config.shards:
        raise ServerError("--max-norm needs shards that receive the updates: give --servers 1 or more.")


def _check_updates(config: ServerConfig, policy: Policy) -> None:
    """Raise ServerError if workers cannot push in the codec of this job."""
    try:
        codec(config.update_codec)
    except ValueError as error:
        raise ServerError(f"--updates: {error}.") from None
    if policy.mixes:
        raise ServerError(
            "--updates is for gradients and differences, and workers push whole models under this policy: leave it out."
        )
    if not config.shards:
        raise ServerError("--updates needs shards that receive the updates: give --servers 1 or more.")


def _describe_exit(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _stop(process: ShardProcess) -> None:
    """Wait for a shard's process to end. Kill it if that takes too long."""
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
