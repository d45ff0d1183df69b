"""One policy measured in a lab: the real server and real workers, on the hosts of a cluster.

Computing is stood in for by waiting (`standin.py`); everything else is as on real machines. What comes out is what the
simulator gives: the same Report, computed from the same events by the same code.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from paceline.lab import synthetic_worker
from paceline.lab.hosts import server_host, worker_host
from paceline.lab.namespaces import SPARSE, Command, Lab, LabError
from paceline.observe.driver import Fault
from paceline.observe.observer import Observer, Recorder, Tee
from paceline.observe.process_usage import cpu_seconds
from paceline.observe.summary import Report, Summary
from paceline.observe.trace import Event
from paceline.policies import make
from paceline.serve.coordinator import event_loop
from paceline.serve.coordinator.config import ServerConfig
from paceline.serve.environment import CONNECT, TOKEN, WORKER, WORKERS
from paceline.serve.server import Address, Server
from paceline.serve.wire.endpoint import Endpoint
from paceline.simulate.cluster_spec import ClusterSpec

STARTING = 60.0  # seconds that the coordinator may take to listen


@dataclass(frozen=True)
class LabPlan:
    """What is run."""

    policy: str
    iterations: int = 20  # of each worker, on average
    streamed: bool = False
    overlap: bool = False  # are gradients pushed while they are computed?
    seed: int = 0
    exactly: bool = False  # does each worker do just so many iterations, and is the last model checked?
    sampled: float = 0.0  # every so many seconds, what the workers' links have carried is noted
    script: tuple[str, ...] = ()  # a training script and its arguments, which is run instead of the stand-in

    @property
    def to_the_end(self) -> bool:
        """Do workers leave by themselves, and is the job over then?"""
        return self.exactly or bool(self.script)


@dataclass(frozen=True)
class Cost:
    """What a run cost, after its warm-up."""

    gigabytes: float  # that crossed the hosts' links
    cpu_seconds: float  # of all processes of the job

    @property
    def cpu_seconds_per_gigabyte(self) -> float:
        return self.cpu_seconds / self.gigabytes if self.gigabytes else 0.0


@dataclass(frozen=True)
class LabResult:
    """What a run in the lab came to."""

    report: Report
    cost: Cost
    seconds: float  # from the first event to the last
    apply: str = "whole"
    events: list[Event] = field(default_factory=list, repr=False)
    carried: dict[int, list[tuple[float, int, int]]] = field(default_factory=dict, repr=False)
    # For each worker, if it was asked for: seconds, and bytes that its link had brought and taken by then


def run(lab: Lab, spec: ClusterSpec, plan: LabPlan, progress: Callable[[float], None] | None = None) -> LabResult:
    """Until every worker has done its iterations, on average. `progress` hears how far it is, from 0 to 1."""
    job = _LabJob(lab, spec, plan)
    try:
        return job.run(progress or (lambda _: None))
    finally:
        job.stop()


class _LabJob:
    """The processes of one run."""

    def __init__(self, lab: Lab, spec: ClusterSpec, plan: LabPlan) -> None:
        self._lab, self._spec, self._plan = lab, spec, plan
        self._token = secrets.token_bytes(16)
        first = server_host(spec, 0)
        self._address = (lab.address(first), SPARSE)
        self._pipe, theirs = lab.pipe()
        self._coordinator = lab.start(first, _coordinate, theirs, self._address, self._token, spec, plan)
        theirs.close()
        self._shards: list[BaseProcess] = []
        self._workers: dict[int, tuple[BaseProcess | Command, Any]] = {}
        self._gone: set[int] = set()  # workers that a fault has killed
        self._timers: list[threading.Timer] = []
        self._spent: dict[int, float] = {}  # CPU seconds of each process, as they were last seen: one may end
        self._carried: dict[int, list[tuple[float, int, int]]] = {}
        self._over = threading.Event()

    def run(self, progress: Callable[[float], None]) -> LabResult:
        lab, spec = self._lab, self._spec
        if not self._pipe.poll(STARTING) or self._pipe.recv()[0] != "listening":
            raise LabError("The coordinator did not start.")
        for number in range(spec.servers):
            host = server_host(spec, number)
            arguments = number, spec.servers, self._address, lab.address(host), self._token
            self._shards.append(lab.start(host, _shard, *arguments))
        for number in range(len(spec.workers)):
            self._start_worker(number)
        before = after = self._so_far()
        while True:
            self._must_live()
            if not self._pipe.poll(0.1):
                if self._plan.to_the_end:  # workers end one by one
                    self._note_cpu([process for process, _ in self._workers.values()])
                continue
            what, value = self._pipe.recv()
            if what == "part":
                progress(value)
            elif what == "began":
                self._plan_faults()
            elif what == "warm":
                before = self._so_far()
                if self._plan.sampled:
                    threading.Thread(target=self._sample, daemon=True).start()
            elif what == "over":
                after = self._so_far()
                self._pipe.send("noted")
            elif what == "failed":
                raise LabError(value)
            else:
                cost = Cost((after[0] - before[0]) / 1e9, after[1] - before[1])
                if self._plan.exactly:
                    self._audit(value.events)
                measured: LabResult = replace(value, cost=cost, carried=self._carried)
                return measured

    def _sample(self) -> None:
        """Note what the workers' links have carried, again and again."""
        while not self._over.wait(self._plan.sampled):
            for number, (process, _) in self._workers.items():
                with contextlib.suppress(OSError):
                    counted = _counted(process)
                    self._carried.setdefault(number, []).append((time.perf_counter(), *counted))

    def stop(self) -> None:
        self._over.set()
        for timer in self._timers:
            timer.cancel()
        for number in range(len(self._spec.workers)):
            with contextlib.suppress(LabError):
                self._lab.mend(worker_host(number))
        self._lab.stop([self._coordinator, *self._shards, *(process for process, _ in self._workers.values())])

    def _start_worker(self, number: int) -> None:
        if self._plan.script:
            variables = {
                CONNECT: "{}:{}".format(*self._address),
                TOKEN: self._token.hex(),
                WORKER: str(number),
                WORKERS: str(len(self._spec.workers)),
            }
            command = [sys.executable, *self._plan.script]
            self._workers[number] = (self._lab.spawn(worker_host(number), command, os.environ | variables), None)
            return
        ours, theirs = self._lab.pipe()
        worker, plan = self._spec.workers[number], self._plan
        task = synthetic_worker.SyntheticTask(
            self._address,
            self._token,
            number,
            worker,
            self._spec.model_bytes,
            plan.seed,
            plan.overlap,
            plan.iterations if plan.exactly else None,
        )
        process = self._lab.start(worker_host(number), synthetic_worker.work, task, theirs)
        theirs.close()
        self._workers[number] = (process, ours)

    def _must_live(self) -> None:
        processes: dict[str, BaseProcess | Command] = {"The coordinator": self._coordinator}
        processes |= {f"Shard {number}": process for number, process in enumerate(self._shards)}
        processes |= {
            f"Worker {number}": process
            for number, (process, _) in self._workers.items()
            if number not in self._gone and not (self._plan.to_the_end and process.exitcode == 0)
        }
        for name, process in processes.items():
            if process.exitcode is not None and not self._pipe.poll(1.0):
                raise LabError(f"{name} ended with exit code {process.exitcode} in the midst of the run.")

    def _so_far(self) -> tuple[float, float]:
        """Bytes that have crossed the hosts' links, and CPU seconds spent, so far."""
        workers = [process for process, _ in self._workers.values()]
        processes: list[BaseProcess | Command] = [self._coordinator, *self._shards, *workers]
        sent = sum(sent for sent, _ in self._lab.carried().values())
        return sent, self._note_cpu(processes)

    def _note_cpu(self, processes: Sequence[BaseProcess | Command]) -> float:
        """CPU seconds of the whole job so far."""
        for process in processes:
            pid = process.pid or 0
            self._spent[pid] = max(self._spent.get(pid, 0.0), _cpu_seconds(process))
        return sum(self._spent.values())

    # Faults

    def _plan_faults(self) -> None:
        for fault in self._spec.faults:
            timer = threading.Timer(fault.time, self._strike, (fault,))
            timer.daemon = True
            timer.start()
            self._timers.append(timer)

    def _strike(self, fault: Fault) -> None:
        number = fault.worker
        process, _ = self._workers[number]
        host = worker_host(number)
        if fault.kind == "kill":
            self._gone.add(number)
            self._note_cpu([process])
            process.kill()
        elif fault.kind == "rejoin":
            self._gone.discard(number)
            self._start_worker(number)
        elif fault.kind == "pause":
            os.kill(process.pid or 0, signal.SIGSTOP)
            self._later(fault.seconds, os.kill, process.pid or 0, signal.SIGCONT)
        else:
            self._lab.cut(host)
            self._later(fault.seconds, self._lab.mend, host)

    def _later(self, seconds: float, do: Callable[..., Any], *arguments: Any) -> None:
        timer = threading.Timer(seconds, do, arguments)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    # The proof

    def _audit(self, events: Sequence[Event]) -> None:
        """Is the last model just what the updates that were applied make of it? Nothing lost, nothing twice."""
        counts: dict[int, int] = {}
        for event in events:
            for worker in getattr(event, "workers", ()):
                counts[worker] = counts.get(worker, 0) + 1
        models = [
            pipe.recv() for number, (_, pipe) in self._workers.items() if number not in self._gone and pipe.poll(10)
        ]
        if not models:
            raise LabError("No worker has handed in the last model.")
        fault = synthetic_worker.differs(models[0], counts, self._spec.model_bytes)
        if fault:
            raise LabError(f"The model is not what was applied: {fault}.")


def _coordinate(pipe: Connection, address: tuple[str, int], token: bytes, spec: ClusterSpec, plan: LabPlan) -> None:
    logging.basicConfig(level=logging.ERROR)
    try:
        pipe.send(("done", event_loop.run(_serve(pipe, address, token, spec, plan))))
    except Exception as error:
        pipe.send(("failed", str(error)))


class _UpdateGoal(Observer):
    """So many updates have arrived."""

    def __init__(self, pipe: Connection, updates: int, warm_up: int) -> None:
        self._pipe, self._updates, self._warm_up = pipe, updates, warm_up
        self._count = self._said = 0
        self.first: float | None = None
        self.reached = asyncio.Event()

    def granted(self, time: float, *_: Any) -> None:
        if self.first is None:
            self.first = time
            self._pipe.send(("began", 0.0))

    def arrived(self, *_: Any) -> None:
        self._count += 1
        if self._count == self._warm_up:
            self._pipe.send(("warm", 0.0))
        if (part := 100 * self._count // self._updates) > self._said:
            self._said = part
            self._pipe.send(("part", part / 100))
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
    )
    observer = Tee(Tee(summary, goal), Recorder(events.append))
    server = Server(lambda: make(plan.policy), config, Address(*address), observer=observer, own_shards=False)
    async with server:
        pipe.send(("listening", 0.0))
        serving = asyncio.ensure_future(server.serve())
        reached = asyncio.ensure_future(goal.reached.wait())
        await asyncio.wait((serving,) if plan.to_the_end else (serving, reached), return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()
        if serving.done():
            serving.result()
        serving.cancel()
        seconds = server.coordinator.now - (goal.first or 0.0)
        pipe.send(("over", 0.0))
        await asyncio.to_thread(pipe.recv)  # until what it cost has been noted: with the processes, that would be gone
        return LabResult(summary.report(), Cost(0.0, 0.0), seconds, server.coordinator.apply, events)


def _shard(number: int, of: int, address: tuple[str, int], listen: str, token: bytes) -> None:
    from paceline.serve.shard.shard import Shard

    threads = max(1, (os.cpu_count() or 1) // of)  # they share the cores of one machine
    Shard(number, Endpoint(*address, token), listen, threads=threads).run()


def _counted(process: BaseProcess | Command) -> tuple[int, int]:
    """Bytes that the link of a process's host has brought and taken, since the lab was built."""
    lines = Path(f"/proc/{process.pid}/net/dev").read_text().splitlines()
    fields = next(line for line in lines if line.strip().startswith("eth0:")).partition(":")[2].split()
    return int(fields[0]), int(fields[8])


def _cpu_seconds(process: BaseProcess | Command) -> float:
    """What a process has spent, in user and in kernel mode."""
    try:
        return cpu_seconds(process.pid or 0)
    except OSError:
        return 0.0
