"""One policy on one cluster, measured: the real server and real workers in a lab."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from paceline.launch import standin
from paceline.launch.lab import SPARSE, Lab, LabError
from paceline.observe.events import Event
from paceline.observe.observer import Observer, Recorder, Tee
from paceline.observe.summary import Report, Summary
from paceline.policies import make
from paceline.serve import loop
from paceline.serve.coordinator import Terms
from paceline.serve.door import Door
from paceline.serve.server import Address, Server
from paceline.simulate.spec import ClusterSpec


@dataclass(frozen=True)
class Measured:
    """What a run in the lab came to."""

    report: Report
    events: list[Event]
    seconds: float


def hosts(spec: ClusterSpec) -> dict[str, float]:
    """The hosts of a cluster, and the rates of their links."""
    servers = {} if spec.colocate else {server_host(spec, number): spec.server_link for number in range(spec.servers)}
    return servers | {worker_host(number): worker.link for number, worker in enumerate(spec.workers)}


def server_host(spec: ClusterSpec, shard: int) -> str:
    return worker_host(shard) if spec.colocate else f"server{shard}"


def worker_host(number: int) -> str:
    return f"worker{number}"


@dataclass(frozen=True)
class Plan:
    """What is run."""

    policy: str
    iterations: int = 20  # of each worker, on average
    streamed: bool = False
    overlap: bool = False  # are gradients pushed while they are computed?
    seed: int = 0


def run(lab: Lab, spec: ClusterSpec, plan: Plan) -> Measured:
    """Until every worker has done its iterations, on average."""
    token = secrets.token_bytes(16)
    first = server_host(spec, 0)
    address = (lab.address(first), SPARSE)
    ours, theirs = lab.pipe()
    coordinator = lab.start(first, _coordinate, theirs, address, token, spec, plan)
    theirs.close()
    if not ours.poll(30) or ours.recv() != "listening":
        raise LabError("The coordinator did not start.")
    others = [
        lab.start(server_host(spec, number), _shard, number, address, lab.address(server_host(spec, number)), token)
        for number in range(spec.servers)
    ]
    others += [
        lab.start(
            worker_host(number),
            standin.work,
            address,
            token,
            number,
            worker,
            spec.model_bytes,
            plan.seed,
            plan.overlap,
        )
        for number, worker in enumerate(spec.workers)
    ]
    try:
        while not ours.poll(0.1):
            for process in (coordinator, *others):
                if process.exitcode is not None and not ours.poll(1.0):
                    raise LabError(f"{process.name} ended with exit code {process.exitcode} in the midst of the run.")
        measured: Measured = ours.recv()
        return measured
    finally:
        lab.stop((coordinator, *others))


def _coordinate(pipe: Connection, address: tuple[str, int], token: bytes, spec: ClusterSpec, plan: Plan) -> None:
    logging.basicConfig(level=logging.WARNING)
    pipe.send(loop.run(_serve(pipe, address, token, spec, plan)))


class _Goal(Observer):
    """So many updates have arrived."""

    def __init__(self, updates: int) -> None:
        self._left = updates
        self.reached = asyncio.Event()

    def arrived(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self.reached.set()


async def _serve(pipe: Connection, address: tuple[str, int], token: bytes, spec: ClusterSpec, plan: Plan) -> Measured:
    workers, iterations, policy = len(spec.workers), plan.iterations, plan.policy
    summary, goal = Summary(warm_up=0 if spec.faults else iterations // 4 * workers), _Goal(iterations * workers)
    events: list[Event] = []
    terms = Terms(
        shards=spec.servers,
        workers=workers,
        token=token,
        lease=spec.lease,
        policy=policy,
        streamed=plan.streamed,
    )
    observer = Tee(Tee(summary, goal), Recorder(events.append))
    server = Server(lambda: make(policy), terms, Address(*address), observer=observer, own_shards=False)
    async with server:
        pipe.send("listening")
        serving = asyncio.ensure_future(server.serve())
        reached = asyncio.ensure_future(goal.reached.wait())
        await asyncio.wait((serving, reached), return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()
        if serving.done():
            serving.result()
        serving.cancel()
        return Measured(summary.report(), events, server.coordinator.now)


def _shard(number: int, address: tuple[str, int], listen: str, token: bytes) -> None:
    import torch

    from paceline.serve.shard import Shard

    torch.set_num_threads(1)
    Shard(number, Door(*address, token), listen).run()
