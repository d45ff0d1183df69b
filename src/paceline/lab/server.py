"""The server's processes in a lab: the coordinator and the shards.

The coordinator sends the process that started it pairs of a word and a value through a pipe: "listening", "began" (the
first iteration was granted), "warm" (the warm-up is over), "part" (the progress, from 0 to 1), "over" (the job is done)
and "done" (with the LabResult), or "failed" (with an error message). It waits for an answer after "over".
"""

from __future__ import annotations

import asyncio
import logging
import os
from multiprocessing.connection import Connection
from typing import Any

from paceline.lab.plan import Cost, LabPlan, LabResult
from paceline.observe.observer import Observer, Recorder, Tee
from paceline.observe.summary import Summary
from paceline.observe.trace import Event
from paceline.policies import make
from paceline.serve.coordinator import event_loop
from paceline.serve.coordinator.config import ServerConfig
from paceline.serve.server import Address, Server
from paceline.serve.wire.endpoint import Endpoint
from paceline.simulate.cluster_spec import ClusterSpec


def coordinate(pipe: Connection, address: tuple[str, int], token: bytes, spec: ClusterSpec, plan: LabPlan) -> None:
    """Run the coordinator. This is the main function of its process."""
    logging.basicConfig(level=logging.ERROR)
    try:
        pipe.send(("done", event_loop.run(_serve(pipe, address, token, spec, plan))))
    except Exception as error:
        pipe.send(("failed", str(error)))


def serve_shard(number: int, replica: int, of: int, address: tuple[str, int], listen: str, token: bytes) -> None:
    """Run one shard. This is the main function of its process."""
    from paceline.serve.shard.shard import Shard

    threads = max(1, (os.cpu_count() or 1) // of)  # all shards share the cores of one machine
    Shard(number, Endpoint(*address, token), listen, threads=threads, replica=replica).run()


class _UpdateGoal(Observer):
    """Counts updates, reports progress through a pipe, and sets `reached` once enough updates have arrived."""

    def __init__(self, pipe: Connection, updates: int, warm_up: int) -> None:
        self._pipe, self._updates, self._warm_up = pipe, updates, warm_up
        self._count = self._percent = 0
        self.first_grant: float | None = None
        self.reached = asyncio.Event()

    def granted(self, time: float, *_: Any) -> None:
        if self.first_grant is None:
            self.first_grant = time
            self._pipe.send(("began", 0.0))

    def arrived(self, *_: Any) -> None:
        self._count += 1
        if self._count == self._warm_up:
            self._pipe.send(("warm", 0.0))
        if (percent := 100 * self._count // self._updates) > self._percent:
            self._percent = percent
            self._pipe.send(("part", percent / 100))
        if self._count == self._updates:
            self.reached.set()


async def _serve(
    pipe: Connection, address: tuple[str, int], token: bytes, spec: ClusterSpec, plan: LabPlan
) -> LabResult:
    workers, iterations = len(spec.workers), plan.iterations
    warm_up = 0 if spec.faults or plan.to_the_end else iterations // 4 * workers
    summary, goal = Summary(warm_up), _UpdateGoal(pipe, iterations * workers, warm_up)
    events: list[Event] = []
    config = ServerConfig(
        shards=spec.servers,
        workers=workers,
        token=token,
        lease=spec.lease,
        policy=plan.policy,
        streamed=plan.streamed,
        replicas=spec.replicas,
        visits=spec.colocate,
        update_codec=spec.updates,
    )
    observer = Tee(Tee(summary, goal), Recorder(events.append))
    # The lab's links are private to it.
    listening = Address(*address, insecure=True)
    server = Server(lambda: make(plan.policy), config, listening, observer=observer, own_shards=False)
    async with server:
        pipe.send(("listening", 0.0))
        serving = asyncio.ensure_future(server.serve())
        reached = asyncio.ensure_future(goal.reached.wait())
        await asyncio.wait((serving,) if plan.to_the_end else (serving, reached), return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()
        if serving.done():
            serving.result()
        serving.cancel()
        seconds = server.coordinator.now - (goal.first_grant or 0.0)
        pipe.send(("over", 0.0))
        # The other end reads CPU times and byte counters before it answers. They are lost when the processes end.
        await asyncio.to_thread(pipe.recv)
        return LabResult(summary.report(), Cost(0.0, 0.0), seconds, server.coordinator.apply, events)
