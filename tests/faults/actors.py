"""The processes of a job: the server, a shard and a worker. Each function runs in a process that was just forked."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from faults.inject import inject
from faults.proxy import Proxy
from faults.scenario import Scenario
from paceline import policies
from paceline.model.description import Description
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.model.optimizer_state import part_of_shard
from paceline.observe.observer import Recorder
from paceline.observe.trace import as_line
from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan
from paceline.serve.coordinator.config import ServerConfig
from paceline.serve.server import Address, Server
from paceline.serve.shard.shard import Shard
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.worker.client import Client
from paceline.serve.worker.transfers import PartOf, Transfers

TOKEN = b"the job's token"
HOST = "127.0.0.1"  # the director chooses another address


def description(scenario: Scenario) -> bytes:
    """Return the description of the scenario's model."""
    size = scenario.samples + scenario.padding
    layout = Layout((Tensor("once", (size,)), Tensor("again", (size,))))
    return Description(layout, OptimizerSpec("SGD", ({"lr": 1.0},))).as_json()


# The server


class _ShardProcess:
    """The process of a shard, which the director has forked. It has the part of subprocess.Popen that a Server uses."""

    def __init__(self, pid: int) -> None:
        self.returncode: int | None = None
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:
            self.returncode = -signal.SIGKILL

    def poll(self, seconds: float = 0.0) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._handle, select.POLLIN)
            if poll.poll(seconds * 1000):
                self.returncode = -signal.SIGKILL
                os.close(self._handle)
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired("shard", timeout)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)


class StagedServer(Server):
    """A Server whose shards are forked by the director, because a process with an event loop should not fork."""

    director: socket.socket
    trace: Any

    async def start(self) -> None:
        await super().start()
        line = {"event": "generation", "version": self.coordinator.ledger.version, "port": self.port}
        self.trace.write(json.dumps(line) + "\n")

    def _start_shard(self, number: int, threads: int, replica: int) -> Any:
        request = {"shard": number, "replica": replica, "port": self.port, "token": self._config.shard_token.hex()}
        self.director.sendall(json.dumps(request).encode() + b"\n")
        return _ShardProcess(int(self.director.recv(64)))


def run_server(scenario: Scenario, folder: Path, director: socket.socket, trace: Path, port: int, resume: bool) -> None:
    """Run the server until the job is done."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s %(message)s")
    inject("coordinator", scenario.faults, folder)
    checkpoints = folder / "checkpoints"
    plan = CheckpointPlan(checkpoints, updates=scenario.every)
    config = ServerConfig(
        *(scenario.shards, scenario.workers, TOKEN, scenario.lease, plan),
        policy=scenario.policy,
        streamed=scenario.streamed,
        visits=scenario.visits,
        replicas=scenario.replicas,
    )

    async def run() -> None:
        with trace.open("w", buffering=1) as lines:
            server = StagedServer(
                lambda: policies.make(scenario.policy),
                config,
                Address(HOST, port),
                observer=Recorder(lambda event: print(as_line(event), file=lines)),
                resume=checkpoints if resume else None,
            )
            server.director, server.trace = director, lines
            await server.start()
            try:
                await server.serve()
            finally:
                await server.stop()

    asyncio.run(run())


def run_shard(scenario: Scenario, folder: Path, number: int, replica: int, port: int, token: bytes) -> None:
    """Run a shard, or its backup, until the server stops it."""
    party = "backup" if replica else "shard"
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s %(message)s")
    injector = inject(party, scenario.faults, folder)
    if any(fault.party == party and fault.point == "relay" for fault in scenario.faults):
        socket.create_connection = Proxy(injector).connect  # type: ignore[assignment]
    try:
        Shard(number, Endpoint(HOST, port, token), token=TOKEN, host=HOST, replica=replica).run()
    except ConnectionError as error:  # its server was killed meanwhile, and another one may listen already
        logging.info("the server is gone: %s", error)


# A worker


class _FinishedBackward:
    """A backward pass that has ended. The worker still sends GradientStarted first, and GradientReady afterwards."""

    def wait(self, start: int) -> None:
        pass

    def outcome(self) -> tuple[float, float | None]:
        return 0.001, None


def run_worker(scenario: Scenario, folder: Path, number: int, port: int) -> None:
    """Run a worker until there are no more samples."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s %(message)s")
    injector = inject("worker", scenario.faults, folder)
    Transfers._shares_link = lambda *_: True  # type: ignore[method-assign]  # as on several machines: workers ask
    if scenario.trickle or any(fault.party == "worker" and fault.point == "relay" for fault in scenario.faults):
        slow = _SlowReader(scenario, folder) if scenario.trickle and number == 0 else None
        socket.create_connection = Proxy(injector, slow).connect  # type: ignore[assignment]
    size = scenario.samples + scenario.padding
    weights = np.zeros(2 * size, dtype=np.float32)
    pushed = np.zeros(2 * size, dtype=np.float32)
    pushes_weights = policies.make(scenario.policy).keeps  # where the server mixes models
    client = Client((HOST, port), description(scenario), TOKEN, number, patience=15.0)
    granted = client.begin(weights.data.cast("B"))
    if any(fault.saved for fault in scenario.faults):
        _await_checkpoint(folder)
    if scenario.loads:
        weights[:] = 0.0
        client.part_of = _part_maker(scenario, weights)
        client.offer(weights.data.cast("B"))
        client.part_of, granted = None, client.granted
    while True:
        given = client.take(granted.batch_size or scenario.batch, scenario.samples, scenario.epochs)
        if given.start == given.stop:
            client.measured("accuracy", 0.5)
            if client.finish(weights.data.cast("B")):
                break
            granted = client.granted  # the server has restored a checkpoint: there may be samples again
            continue
        counts = np.zeros(2 * size, dtype=np.float32)
        counts[given.start : given.stop] = counts[size + given.start : size + given.stop] = 1
        pushed[:] = counts if pushes_weights else -counts
        granted = client.exchange(
            pushed.data.cast("B"),
            weights.data.cast("B"),
            batch_size=given.stop - given.start,
            compute_seconds=0.001,
            rates=[1.0],
            taken=[given.number],
            backward=_FinishedBackward() if scenario.streamed and number % 2 else None,
        )
        if scenario.loads:
            assert client.pull_state()
            granted = client.granted
    client.close()


def _part_maker(scenario: Scenario, weights: Any) -> PartOf:
    """Return a function that makes a shard's part of a checkpoint with these weights. The optimizer has no state."""
    import torch

    described = Description.from_json(description(scenario))
    states: list[dict[str, Any]] = [{} for _ in described.layout.tensors]
    flat = torch.from_numpy(weights)
    return lambda pieces: part_of_shard(described.layout, described.optimizer, pieces, flat, states)


def _await_checkpoint(folder: Path) -> None:
    """Wait for the first checkpoint, so that the server can restore one after a fault."""
    while not any((folder / "checkpoints").glob("version-*[0-9]")):
        time.sleep(0.005)


class _SlowReader:
    """Reads its first pull a few bytes at a time, until other workers have applied some updates."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self._trickle, self._folder = scenario.trickle, folder
        self._applied_before: int | None = None  # when the first pull began

    def __call__(self, name: str, sock: socket.socket, size: int) -> bytes:
        if name != "Weights":
            return sock.recv(size)
        if self._applied_before is None:
            self._applied_before = self._applied()
        if self._applied() - self._applied_before < self._trickle:
            time.sleep(0.005)
            return sock.recv(min(size, 64))
        return sock.recv(size)

    def _applied(self) -> int:
        """Return the number of updates that the trace says were applied."""
        return sum(path.read_text().count('"applied"') for path in self._folder.glob("trace-*.jsonl"))
