"""Thousands of clients of one real server, all connected at the same time.

One process holds all clients. Each is a coroutine that sends the messages of `paceline.serve.worker.client` over its
own sockets. All clients push the same change, so the model of every version is known, and every pull is checked. The
baseline is a bare TCP server that receives the same bytes (`bare_server.py`).
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.crowd.bare_server import connected, fill
from benchmarks.crowd.load import CrowdError, CrowdResult, Load, ServerUsage, allow, started
from benchmarks.transports.load import as_bytes
from paceline.model.description import Description
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import SUMS
from paceline.policies import make
from paceline.policies.bsp import BSP
from paceline.policies.components import count_of
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
from paceline.serve.wire.tokens import token_for
from paceline.serve.worker.control import FROM_COORDINATOR
from paceline.serve.worker.endings import retry_pauses
from paceline.serve.worker.transfers import FROM_SHARD

TOKEN = token_for("worker", b"")
PATIENCE = 60.0  # seconds in which a connection is retried
LONGEST = 600.0  # seconds in which all clients must connect, pull, or finish their rounds
SETTLING = 1.0  # seconds between the last push and the last look at memory
# Bytes that the running threads of a shard take, as a base and per client, without the pushes that they receive.
# Measured with a small model (4 kB; 40 kB for 50 clients): 50, 1,000 and 2,000 clients took 67, 110 and 140 MB.
THREADS_BASE, THREADS_PER_CLIENT = 80_000_000, 40_000
TOLERANCE = 1e-5  # relative rounding error of float32 over a few thousand versions


def serve(load: Load, policy: str, progress: Callable[[str], None] = lambda _line: None) -> CrowdResult:
    """Run `paceline federate serve` with all clients, and measure it."""
    allow(2 * load.clients)
    command = ["-m", "paceline", "federate", "serve", "--clients", str(load.clients), "--policy", policy]
    with started(command) as (process, port):
        crowd = _Crowd(load, port, process.pid, progress)
        figure = event_loop.run(crowd.run())
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise CrowdError(f"The server still ran {PATIENCE:g} s after all clients had left.") from None
        if code:
            raise CrowdError(f"The server ended with exit code {code}; its output above says why.")
        return figure


def bound(load: Load, policy: str) -> int:
    """Return the maximum bytes that a shard takes for updates and copies of the model under fl-r2sp.

    A shard holds the model; a running sum for each group, or with the filter a quorum of updates; the pushes that it
    receives; and a copy of each older version that workers still pull, at most one per group. Where models are compared
    (moves=model with the filter), it also keeps the versions that clients train from: one for each group, and one for
    each client that missed its group's last quorum, because such a client is granted by itself.
    """
    made = make(policy)
    if not (isinstance(made, FLR2SP) and isinstance(made.policy, Groups) and isinstance(made.policy.inner, BSP)):
        raise CrowdError(f"The memory bound is known only for fl-r2sp; got {policy}.")
    groups, fraction = made.count, made.policy.inner.fraction
    sizes = [len(range(group, load.clients, groups)) for group in range(groups)]
    quorum = sum(count_of(fraction, size) for size in sizes)
    held = quorum if made.compares else groups
    received = min(load.clients, max(MIN_AT_ONCE, AT_ONCE // load.bytes))
    bases = groups + load.clients - quorum if made.compares and made.mixes else 0
    return load.bytes * (1 + held + received + groups + bases)


def thread_bytes(load: Load) -> int:
    """Return the approximate bytes that the running threads of a shard take."""
    return THREADS_BASE + THREADS_PER_CLIENT * load.clients


class _Wire:
    """Frames over a non-blocking socket. `serve.wire.frames.Channel` does the same over a blocking one."""

    def __init__(self, sock: socket.socket, reader: MessageDecoder) -> None:
        self._socket, self._reader = sock, reader
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._prefix = memoryview(bytearray(PREFIX.size))

    @classmethod
    async def open(cls, host: str, port: int, reader: MessageDecoder) -> _Wire:
        """Connect, and do the handshake."""
        async with asyncio.timeout(SECONDS):
            return await cls._with_handshake(cls(await connected(host, port), reader))

    @classmethod
    async def _with_handshake(cls, wire: _Wire) -> _Wire:
        try:
            challenge = await wire.receive()
            proof = handshake.proof(TOKEN, challenge)
            await wire.send(proof)
            handshake.verify(TOKEN, challenge, proof, await wire.receive())
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
        """Return the next message. Receive its body, if it has one, into the buffer."""
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
        """Return the next message, which must be of this kind."""
        message = await self.receive(body)
        if not isinstance(message, kind):
            raise CrowdError(f"The server answered with {type(message).__name__} instead of {kind.__name__}.")
        return message

    def close(self) -> None:
        self._socket.close()


class _Crowd:
    """All clients of a federation, with a model that the benchmark knows for every version."""

    def __init__(self, load: Load, port: int, process: int, progress: Callable[[str], None]) -> None:
        self._load, self._port, self._progress = load, port, progress
        self._process = process
        layout = Layout((Tensor("weights", (load.elements,)),))
        self._description = memoryview(Description(layout, SUMS).as_json())
        self._change = (torch.arange(load.elements) % 7 + 1).to(torch.float32)
        self._unit: torch.Tensor | None = None  # the change of the model per version, known after the first one
        self._spare: list[torch.Tensor] = []  # buffers for pulls
        self._wires: list[_Wire] = []
        self._controls: dict[int, _Wire] = {}
        self._lease = PATIENCE
        self._rounds = [0] * load.clients
        self._connected = self._pulled = self._done = 0  # numbers of clients
        self._first_connected, self._others_connected = asyncio.Event(), asyncio.Event()
        self._all_pulled, self._go, self._all_done = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._retries = 0
        self._version = 0

    async def run(self) -> CrowdResult:
        """Connect all clients, let each do its rounds, and leave the job."""
        last = self._load.clients - 1
        tasks = [asyncio.ensure_future(doing) for doing in (self._client(0), self._send_heartbeats())]
        try:
            await self._wait_for(self._first_connected, tasks)
            server, began = ServerUsage(self._process), time.monotonic()
            tasks += [asyncio.ensure_future(self._client(number)) for number in range(1, last)]
            await self._wait_for(self._others_connected, tasks)
            tasks.append(asyncio.ensure_future(self._client(last)))  # the federation begins when the last client joins
            connecting = time.monotonic() - began
            self._progress(f"{self._load.clients} clients are connected after {connecting:.1f} s")
            await self._wait_for(self._all_pulled, tasks)
            server.sample_memory()
            cpu, began = server.cpu_seconds(), time.monotonic()
            self._go.set()
            await self._wait_for(self._all_done, tasks)
            seconds, cpu = time.monotonic() - began, server.cpu_seconds() - cpu
            exchanges = sum(self._rounds)
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(SETTLING)
        server.sample_memory()
        memory = server.memory()
        for control in self._controls.values():
            await control.send(Leave())
        for wire in self._wires:
            wire.close()
        least = min(self._rounds)
        return CrowdResult(seconds, exchanges, least, cpu, memory, connecting, self._retries, self._version)

    async def _wait_for(self, event: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
        """Wait for an event. Raise the error of a client that fails meanwhile."""
        awaited: asyncio.Future[Any] = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait((awaited, *tasks), timeout=LONGEST, return_when=asyncio.FIRST_COMPLETED)
            for each in tasks:
                if each.done():
                    each.result()
            if not event.is_set():
                raise CrowdError(f"The clients did not finish within {LONGEST:g} s: the server cannot handle the load.")
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
        """Connect with retries, as a real client does."""
        for pause in retry_pauses(PATIENCE):
            try:
                wire = await _Wire.open(host, port, reader)
            except OSError:  # TimeoutError is one too
                self._retries += 1
                await asyncio.sleep(pause)
            else:
                self._wires.append(wire)
                return wire
        raise CrowdError(
            f"The server at {host}:{port} accepted no connection for {PATIENCE:g} s: it cannot handle the load."
        )

    async def _pull(self, control: _Wire, shard: _Wire, after: int) -> tuple[GrantIteration, int]:
        """Wait for the next Grant, and pull the model. If the server asks for initial weights, send zeros."""
        while not (isinstance(message := await control.receive(), GrantIteration) and message.iteration > after):
            if isinstance(message, ProvideWeights):
                await shard.send(InitialWeights(), as_bytes(torch.zeros(self._load.elements)))
                await shard.expect(InitialWeightsReceived)
        weights = self._spare.pop() if self._spare else torch.empty(self._load.elements)
        await shard.send(Pull(message.version))
        version = (await shard.expect(Weights, as_bytes(weights))).version
        self._check(weights, version, message.version)
        self._version = max(self._version, version)
        self._spare.append(weights)
        return message, version

    def _check(self, weights: torch.Tensor, version: int, granted: int) -> None:
        """Raise CrowdError unless these are the weights of the version. Every version changes the model equally."""
        if version < granted:
            raise CrowdError(f"The server granted version {granted} and sent version {version}.")
        if version and self._unit is None:
            share = -float(weights[0] / self._change[0]) / version
            self._unit = self._change * -share
        expected = torch.zeros(1) if self._unit is None else self._unit * version
        if float((weights - expected).abs().max()) > TOLERANCE * float(expected.abs().max()):
            raise CrowdError(f"Version {version} of the model does not match the pushes.")

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._lease / 3)
            for control in list(self._controls.values()):
                await control.send(Heartbeat())
