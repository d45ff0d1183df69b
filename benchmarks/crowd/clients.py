"""Very many clients at one real server, all connected at the same time.

One process holds them all: each is a coroutine that says what `paceline.serve.worker.client` would say, over sockets
of its own. All of them push the same change, so the model that belongs to a version is known, and every pull is checked
against it. What that costs is measured beside a bare TCP server that is sent the same bytes (`bare.py`).
"""

from __future__ import annotations

import asyncio
import math
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.crowd.bare_server import connected, fill
from benchmarks.crowd.load import CrowdError, CrowdResult, Load, Watched, allow, started
from benchmarks.transports.load import as_bytes
from paceline.model.description import Description
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import SUMS
from paceline.policies import make
from paceline.policies.bsp import BSP
from paceline.policies.fl_r2sp import FLR2SP
from paceline.policies.groups import Groups
from paceline.serve.coordinator import event_loop
from paceline.serve.shard.shard import AT_ONCE, MIN_AT_ONCE
from paceline.serve.wire import handshake
from paceline.serve.wire.endpoint import SECONDS
from paceline.serve.wire.frames import PREFIX, MessageDecoder, decode_prefix, encode
from paceline.serve.wire.messages import (
    Expelled,
    GradientReady,
    GrantIteration,
    Heartbeat,
    Hello,
    InitialWeights,
    InitialWeightsReceived,
    Join,
    Leave,
    ProvideWeights,
    Pull,
    Push,
    PushReceived,
    Refused,
    Weights,
    Welcome,
)
from paceline.serve.worker.incarnation import FROM_COORDINATOR
from paceline.serve.worker.transfers import FROM_SHARD, retry_pauses

PATIENCE = 60.0  # seconds for which a connection is tried
LONGEST = 600.0  # seconds for a crowd to connect, to pull, or to do its rounds
SETTLING = 1.0  # seconds after the last push, before memory is looked at again
# Bytes that a shard takes once its threads are at work, in all and for each, beside what they receive: measured with a
# small model (4 kB; 40 kB for the 50), where 50, 1,000 and 2,000 of them took 67, 110 and 140 MB.
AT_WORK, EACH_AT_WORK = 80_000_000, 40_000
CLOSE = 1e-5  # of a weight: what float32 may lose over a few thousand versions


def serve(load: Load, policy: str, progress: Callable[[str], None] = lambda _said: None) -> CrowdResult:
    """Load `paceline federate serve` with a crowd of clients."""
    allow(2 * load.clients)
    command = ["-m", "paceline", "federate", "serve", "--clients", str(load.clients), "--policy", policy]
    with started(command) as (process, port):
        crowd = _Crowd(load, port, process.pid, progress)
        figure = event_loop.run(crowd.run())
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise CrowdError(f"The server went on for {PATIENCE:g} s after all clients had left.") from None
        if code:
            raise CrowdError(f"The server ended with exit code {code}; its output above says why.")
        return figure


def bound(load: Load, policy: str) -> int:
    """Bytes that a shard may take for updates and copies of the model under fl-r2sp, whatever clients do at once.

    The model; what is held for each group, a sum or a quorum; pushes that are being received; and a copy for the
    pulls of each version that the model has left behind, which is one for each group at the most.
    """
    made = make(policy)
    if not (isinstance(made, FLR2SP) and isinstance(made.policy, Groups) and isinstance(made.policy.inner, BSP)):
        raise CrowdError(f"{policy} is not fl-r2sp, and its memory is not known: give fl-r2sp, with options.")
    groups, fraction = made.count, made.policy.inner.fraction
    sizes = [len(range(group, load.clients, groups)) for group in range(groups)]
    held = sum(max(1, math.floor(fraction * size + 1e-9)) for size in sizes) if made.compares else groups
    received = min(load.clients, max(MIN_AT_ONCE, AT_ONCE // load.bytes))
    return load.bytes * (1 + held + received + groups)


def at_work(load: Load) -> int:
    """Bytes, about, that the threads of a shard take besides, once they are at work."""
    return AT_WORK + EACH_AT_WORK * load.clients


class _Wire:
    """Frames over a socket of an event loop, as `serve.wire.Channel` has them over one that blocks."""

    def __init__(self, sock: socket.socket, reader: MessageDecoder) -> None:
        self._socket, self._reader = sock, reader
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._prefix = memoryview(bytearray(PREFIX.size))

    @classmethod
    async def open(cls, host: str, port: int, reader: MessageDecoder) -> _Wire:
        """Connect and greet."""
        async with asyncio.timeout(SECONDS):
            return await cls._greeted(cls(await connected(host, port), reader))

    @classmethod
    async def _greeted(cls, wire: _Wire) -> _Wire:
        try:
            asked = await wire.receive()
            answer = handshake.proof(b"", asked)
            await wire.send(answer)
            handshake.verify(b"", asked, answer, await wire.receive())
        except BaseException:
            wire.close()
            raise
        return wire

    async def send(self, message: Any, body: memoryview | None = None) -> None:
        async with self._sending:
            await self._loop.sock_sendall(self._socket, encode(message, len(body) if body else 0))
            if body:
                await self._loop.sock_sendall(self._socket, body)

    async def receive(self, body: memoryview | None = None) -> Any:
        """The next message, and its body if it has one."""
        await fill(self._loop, self._socket, self._prefix)
        head_size, body_size = decode_prefix(self._prefix)
        head = bytearray(head_size)
        await fill(self._loop, self._socket, memoryview(head))
        message = self._reader.head(head)
        if isinstance(message, Refused | Expelled):
            raise CrowdError(f"The server refused a client: {message.reason}")
        if body_size:
            if body is None or len(body) != body_size:
                raise CrowdError(f"The server sent a {type(message).__name__} of {body_size} bytes.")
            await fill(self._loop, self._socket, body)
        return message

    async def expect(self, kind: type, body: memoryview | None = None) -> Any:
        """The next message, which must be one of these."""
        message = await self.receive(body)
        if not isinstance(message, kind):
            raise CrowdError(f"The server answered with {type(message).__name__} instead of {kind.__name__}.")
        return message

    def close(self) -> None:
        self._socket.close()


class _Crowd:
    """All clients of a federation."""

    def __init__(self, load: Load, port: int, process: int, progress: Callable[[str], None]) -> None:
        self._load, self._port, self._progress = load, port, progress
        self._process = process
        layout = Layout((Tensor("weights", (load.elements,)),))
        self._description = memoryview(Description(layout, SUMS).as_json())
        self._change = (torch.arange(load.elements) % 7 + 1).to(torch.float32)
        self._unit: torch.Tensor | None = None  # what one version moves the model by, once one is known
        self._spare: list[torch.Tensor] = []  # to pull into
        self._wires: list[_Wire] = []
        self._controls: dict[int, _Wire] = {}
        self._lease = PATIENCE
        self._rounds = [0] * load.clients
        self._connected = self._pulled = self._done = 0  # clients that are
        self._first_connected, self._others_connected = asyncio.Event(), asyncio.Event()
        self._all_pulled, self._go, self._all_done = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._turned_away = 0
        self._version = 0

    async def run(self) -> CrowdResult:
        """Connect all, let them exchange until each has done its rounds, and leave."""
        last = self._load.clients - 1
        tasks = [asyncio.ensure_future(doing) for doing in (self._client(0), self._beat())]
        try:
            await self._unless_lost(self._first_connected, tasks)
            server, began = Watched(self._process), time.monotonic()
            tasks += [asyncio.ensure_future(self._client(number)) for number in range(1, last)]
            await self._unless_lost(self._others_connected, tasks)
            tasks.append(asyncio.ensure_future(self._client(last)))  # with the last, the federation begins
            connecting = time.monotonic() - began
            self._progress(f"{self._load.clients} clients are connected after {connecting:.1f} s")
            await self._unless_lost(self._all_pulled, tasks)
            server.look()
            cpu, began = server.cpu_seconds(), time.monotonic()
            self._go.set()
            await self._unless_lost(self._all_done, tasks)
            seconds, cpu = time.monotonic() - began, server.cpu_seconds() - cpu
            exchanges = sum(self._rounds)
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(SETTLING)
        server.look()
        memory = server.memory()
        for control in self._controls.values():
            await control.send(Leave())
        for wire in self._wires:
            wire.close()
        least = min(self._rounds)
        return CrowdResult(seconds, exchanges, least, cpu, memory, connecting, self._turned_away, self._version)

    async def _unless_lost(self, event: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
        """Until it happens; what a client stumbles over is raised here."""
        awaited: asyncio.Future[Any] = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait((awaited, *tasks), timeout=LONGEST, return_when=asyncio.FIRST_COMPLETED)
            for each in tasks:
                if each.done():
                    each.result()
            if not event.is_set():
                raise CrowdError(f"The clients were not through after {LONGEST:g} s: the server does not hold.")
        finally:
            awaited.cancel()

    async def _client(self, number: int) -> None:
        control = self._controls[number] = await self._open("127.0.0.1", self._port, FROM_COORDINATOR)
        await control.send(Join(number), self._description)
        welcome = await control.expect(Welcome)
        self._lease = welcome.lease
        ((host, port, _),) = welcome.shards
        shard = await self._open(host or "127.0.0.1", port, FROM_SHARD)
        await shard.send(Hello(welcome.worker, welcome.incarnation, welcome.ticket))
        self._connected += 1
        self._first_connected.set()
        if self._connected == self._load.clients - 1:
            self._others_connected.set()
        granted, version = await self._pull(control, shard, 0)
        self._pulled += 1
        if self._pulled == self._load.clients:
            self._all_pulled.set()
        await self._go.wait()
        gradient = as_bytes(self._change)
        while True:
            await control.send(GradientReady(granted.iteration, version, 1, 0.0, None))
            await shard.send(Push(granted.iteration, (1.0,)), gradient)
            await shard.expect(PushReceived)
            granted, version = await self._pull(control, shard, granted.iteration)
            self._rounds[number] += 1
            if self._rounds[number] == self._load.rounds:
                self._done += 1
                if self._done % max(1, self._load.clients // 4) == 0:
                    self._progress(f"{self._done} clients have done {self._load.rounds} rounds")
                if self._done == self._load.clients:
                    self._all_done.set()

    async def _open(self, host: str, port: int, reader: MessageDecoder) -> _Wire:
        """As a client does it: again and again, if it is not let in."""
        for pause in retry_pauses(PATIENCE):
            try:
                wire = await _Wire.open(host, port, reader)
            except OSError:  # TimeoutError is one too
                self._turned_away += 1
                await asyncio.sleep(pause)
            else:
                self._wires.append(wire)
                return wire
        raise CrowdError(f"The server at {host}:{port} let a client wait for {PATIENCE:g} s: it does not hold.")

    async def _pull(self, control: _Wire, shard: _Wire, after: int) -> tuple[GrantIteration, int]:
        """Wait for the next Grant, and pull the model. If asked to, give it first: all zeros."""
        while not (isinstance(heard := await control.receive(), GrantIteration) and heard.iteration > after):
            if isinstance(heard, ProvideWeights):
                await shard.send(InitialWeights(), as_bytes(torch.zeros(self._load.elements)))
                await shard.expect(InitialWeightsReceived)
        place = self._spare.pop() if self._spare else torch.empty(self._load.elements)
        await shard.send(Pull(heard.version))
        version = (await shard.expect(Weights, as_bytes(place))).version
        self._check(place, version, heard.version)
        self._version = max(self._version, version)
        self._spare.append(place)
        return heard, version

    def _check(self, weights: torch.Tensor, version: int, granted: int) -> None:
        """Is it the model of this version? As nobody leaves, each moves it as far as the one before."""
        if version < granted:
            raise CrowdError(f"Version {granted} was granted, and version {version} was sent.")
        if version and self._unit is None:
            share = -float(weights[0] / self._change[0]) / version
            self._unit = self._change * -share
        expected = torch.zeros(1) if self._unit is None else self._unit * version
        if float((weights - expected).abs().max()) > CLOSE * float(expected.abs().max()):
            raise CrowdError(f"Version {version} of the model is not what the pushes come to.")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._lease / 3)
            for control in list(self._controls.values()):
                await control.send(Heartbeat())
