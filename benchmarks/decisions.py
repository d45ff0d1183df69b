"""Decision latency: from the last byte of the push that a Grant depends on to the first byte of that Grant.

Eight worker processes, a real coordinator and a real shard with a tiny model run on one machine and share its clock. A
Grant that the policy delays on purpose (R²SP's gaps) is counted and not timed.

make bench            or            python benchmarks/decisions.py
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import statistics
import sys
import time
from dataclasses import dataclass, field

from paceline.model.description import Description
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.observe.observer import Recorder
from paceline.observe.trace import Arrived, Event, Granted
from paceline.policies import make
from paceline.serve.coordinator import event_loop
from paceline.serve.wire import handshake, messages
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.frames import Channel
from paceline.serve.wire.tokens import token_for
from paceline.serve.worker.control import FROM_COORDINATOR
from paceline.serve.worker.transfers import FROM_SHARD

WORKERS = 8
ITERATIONS = 150
WARM_UP = 10  # iterations of each worker that are not timed
ELEMENTS = 256
COMPUTE = 0.02  # seconds, ± 20%: workers sleep, so that the cores are free when a push arrives
TARGET = 1e-3


def work(port: int) -> None:
    """Run one worker, without threads, so that nothing delays its timestamps."""
    endpoint = Endpoint("127.0.0.1", port, token_for("worker", b""))
    line = socket.create_connection((endpoint.host, endpoint.port))
    control = Channel(line, FROM_COORDINATOR)
    handshake.call(control, endpoint.token)
    layout = Layout((Tensor("w", (ELEMENTS,)),))
    described = Description(layout, OptimizerSpec("SGD", ({"lr": 0.1},))).as_json()
    control.send(messages.Join(), memoryview(described))
    welcome = control.receive()
    ((host, shard_port, *_),) = welcome.shards
    shard, _ = endpoint.at(host, shard_port).open(FROM_SHARD)
    shard.send(messages.Hello(welcome.worker, welcome.incarnation, welcome.ticket))
    body = memoryview(bytearray(ELEMENTS * 4))
    if welcome.worker == 0:  # the first worker provides the initial weights
        assert isinstance(control.receive(), messages.ProvideWeights)
        shard.send(messages.InitialWeights(), body)
        shard.receive()
    draw = random.Random(welcome.worker).uniform
    sent, granted = {}, {}
    for iteration in range(1, ITERATIONS + 1):
        line.recv(1, socket.MSG_PEEK)
        granted[iteration] = time.monotonic()
        grant = control.receive()
        shard.send(messages.Pull(grant.version))
        version = shard.receive(lambda _message, _size: body).version
        time.sleep(COMPUTE * draw(0.8, 1.2))
        control.send(messages.GradientReady(iteration, version, 1, COMPUTE, None))
        shard.send(messages.Push(iteration, (0.1,)), body)
        sent[iteration] = time.monotonic()
        shard.receive()
    control.send(messages.Leave())
    control.finish()
    print(json.dumps({"worker": welcome.worker, "sent": sent, "granted": granted}))


@dataclass
class Latencies:
    """The latencies of immediate decisions, and the number of Grants that the policy delayed."""

    immediate: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # of these, the first Grant after each push; a barrier grants many
    delayed: int = 0

    def shown(self) -> str:
        if len(self.immediate) < 2:
            return f"no immediate decisions ({self.delayed} Grants delayed by the policy)"
        cuts = statistics.quantiles(self.immediate, n=100)
        median = statistics.median(self.immediate)
        verdict = "reached" if median <= TARGET else "MISSED"
        first = statistics.median(self.first)
        return (
            f"median {median * 1e3:5.2f} ms (first Grant after a push: {first * 1e3:.2f}), "
            f"95% {cuts[94] * 1e3:5.2f}, 99% {cuts[98] * 1e3:5.2f}, of {len(self.immediate)} immediate Grants; "
            f"{self.delayed} delayed by the policy (target ≤ {TARGET * 1e3:g} ms: {verdict})"
        )


async def measure(policy: str) -> Latencies:
    """Run a job under the policy and return its decision latencies."""
    from paceline.serve.coordinator.config import ServerConfig  # here, because workers do not need it
    from paceline.serve.server import Server

    events: list[Event] = []
    async with Server(lambda: make(policy), ServerConfig(workers=WORKERS), observer=Recorder(events.append)) as server:
        processes = [
            await asyncio.create_subprocess_exec(
                sys.executable, __file__, "--worker", str(server.port), stdout=asyncio.subprocess.PIPE
            )
            for _ in range(WORKERS)
        ]
        try:
            reports = [json.loads((await process.communicate())[0]) for process in processes]
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
    sent = {(each["worker"], int(number)): at for each in reports for number, at in each["sent"].items()}
    granted = {(each["worker"], int(number)): at for each in reports for number, at in each["granted"].items()}
    return latencies(events, sent, granted)


def latencies(
    events: list[Event], sent: dict[tuple[int, int], float], granted: dict[tuple[int, int], float]
) -> Latencies:
    """Match Grants with arrivals. A Grant with the timestamp of an arrival was decided by it; others were delayed."""
    found = Latencies()
    cause: Arrived | None = None
    first = False  # whether the next Grant is the first after this arrival
    count = dict.fromkeys((worker for worker, _ in sent), 0)
    for event in events:
        if isinstance(event, Arrived):
            cause, first = event, True
        elif isinstance(event, Granted):
            count[event.worker] += 1
            which = event.worker, count[event.worker]
            if which[1] <= WARM_UP or which not in granted:
                continue
            if cause is None or cause.time != event.time:
                found.delayed += 1
            else:
                seconds = granted[which] - sent[cause.worker, cause.iteration]
                found.immediate.append(seconds)
                if first:
                    found.first.append(seconds)
                first = False
    return found


def main() -> None:
    if "--worker" in sys.argv:
        work(int(sys.argv[-1]))
        return
    print(f"Decisions: {WORKERS} workers, last byte of the push to first byte of the Grant.")
    for policy in ("bsp", "asp", "r2sp"):
        print(f"  {policy:14s} {event_loop.run(measure(policy)).shown()}")


if __name__ == "__main__":
    main()
