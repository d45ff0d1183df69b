"""Measures one policy in a lab: the real server and real workers, on the hosts of a cluster.

Workers wait instead of computing (`synthetic_worker.py`); everything else is as on real machines. The result is the
Report that the simulator also returns, computed from the same events by the same code.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from paceline.lab import synthetic_worker
from paceline.lab.host_process import Command
from paceline.lab.hosts import backup_host, server_host, worker_host
from paceline.lab.namespaces import Lab, LabError
from paceline.lab.plan import Cost, LabPlan, LabResult
from paceline.lab.server import coordinate, serve_shard
from paceline.lab.shaping import SPARSE
from paceline.observe.driver import Fault
from paceline.observe.process_usage import cpu_seconds
from paceline.observe.trace import Event
from paceline.serve.environment import CONNECT, TOKEN, WORKER, WORKERS
from paceline.serve.wire.endpoint import Endpoint
from paceline.simulate.cluster_spec import ClusterSpec

STARTING = 60.0  # seconds that the coordinator may take to listen


def run(
    lab: Lab,
    spec: ClusterSpec,
    plan: LabPlan,
    progress: Callable[[float], None] | None = None,
    show: Callable[[Endpoint], None] | None = None,
) -> LabResult:
    """Run a plan until every worker has done its iterations, on average. Return the measurements.

    progress: called with the progress of the run, from 0 to 1. show: called with the server's address in the lab, for
    a page that shows the job.
    """
    job = _LabJob(lab, spec, plan)
    try:
        return job.run(progress or (lambda _: None), show)
    finally:
        job.stop()


class _LabJob:
    """The processes of one run: a coordinator, shards and workers."""

    def __init__(self, lab: Lab, spec: ClusterSpec, plan: LabPlan) -> None:
        self._lab, self._spec, self._plan = lab, spec, plan
        self._token = secrets.token_bytes(16)
        first = server_host(spec, 0)
        self._address = (lab.address(first), SPARSE)
        self._pipe, theirs = lab.pipe()
        self._coordinator = lab.start(first, coordinate, theirs, self._address, self._token, spec, plan)
        theirs.close()
        self._shards: list[BaseProcess] = []
        self._workers: dict[int, tuple[BaseProcess | Command, Any]] = {}  # process, and pipe of a synthetic worker
        self._killed: set[int] = set()  # workers that a fault or the end of the run has killed
        self._timers: list[threading.Timer] = []
        self._cpu_by_pid: dict[int, float] = {}  # last known CPU seconds of each process, some of which have ended
        self._carried: dict[int, list[tuple[float, int, int]]] = {}
        self._stopped = threading.Event()

    def run(self, progress: Callable[[float], None], show: Callable[[Endpoint], None] | None = None) -> LabResult:
        """Start the shards and workers, and return the measurements once the job is over."""
        if not self._pipe.poll(STARTING) or self._pipe.recv()[0] != "listening":
            raise LabError("The coordinator did not start.")
        if show:
            show(Endpoint(*self._address, self._token))
        for replica in range(1 + self._spec.replicas):
            for number in range(self._spec.servers):
                self._start_shard(number, replica)
        for number in range(len(self._spec.workers)):
            self._start_worker(number)
        before = after = self._usage()
        while True:
            self._check_alive()
            if not self._pipe.poll(0.1):
                if self._plan.to_the_end:  # workers end one by one, and their CPU times with them
                    self._read_cpu([process for process, _ in self._workers.values()])
                continue
            what, value = self._pipe.recv()
            if what == "part":
                progress(value)
            elif what == "began":
                for fault in self._spec.faults:
                    self._later(fault.time, self._inject, fault)
            elif what == "warm":
                before = self._usage()
                if self._plan.sampled:
                    threading.Thread(target=self._sample, daemon=True).start()
            elif what == "over":
                after = self._usage()
                if not self._plan.to_the_end:
                    self._end_workers()
                self._pipe.send("noted")
            elif what == "failed":
                raise LabError(value)
            else:
                cost = Cost((after[0] - before[0]) / 1e9, after[1] - before[1])
                if self._plan.exactly:
                    self._check_model(value.events)
                measured: LabResult = replace(value, cost=cost, carried=self._carried)
                return measured

    def stop(self) -> None:
        """Cancel pending faults, restore all links, and stop all processes."""
        self._stopped.set()
        for timer in self._timers:
            timer.cancel()
        for number in range(len(self._spec.workers)):
            with contextlib.suppress(LabError):
                self._lab.mend(worker_host(number))
        self._lab.stop([self._coordinator, *self._shards, *(process for process, _ in self._workers.values())])

    def _end_workers(self) -> None:
        """Terminate the workers. If the server ended before them, they would warn that it is lost."""
        for number, (process, _) in self._workers.items():
            self._killed.add(number)
            process.terminate()

    def _start_shard(self, number: int, replica: int) -> None:
        host = backup_host(self._spec, number) if replica else server_host(self._spec, number)
        processes = self._spec.servers * (1 + self._spec.replicas)
        arguments = number, replica, processes, self._address, self._lab.address(host), self._token
        self._shards.append(self._lab.start(host, serve_shard, *arguments))

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
            self._spec.local_steps,
            self._spec.overlap,
        )
        process = self._lab.start(worker_host(number), synthetic_worker.work, task, theirs)
        theirs.close()
        self._workers[number] = (process, ours)

    def _check_alive(self) -> None:
        """Raise LabError if a process has ended unexpectedly."""
        processes: dict[str, BaseProcess | Command] = {"The coordinator": self._coordinator}
        processes |= {f"Shard {number}": process for number, process in enumerate(self._shards)}
        processes |= {
            f"Worker {number}": process
            for number, (process, _) in self._workers.items()
            if number not in self._killed and not (self._plan.to_the_end and process.exitcode == 0)
        }
        for name, process in processes.items():
            if process.exitcode is not None and not self._pipe.poll(1.0):
                raise LabError(f"{name} ended with exit code {process.exitcode} during the run.")

    # Measurements

    def _usage(self) -> tuple[float, float]:
        """Return the bytes that all hosts have sent, and the CPU seconds that the job has used, so far."""
        workers = [process for process, _ in self._workers.values()]
        sent = sum(sent for sent, _ in self._lab.carried().values())
        return sent, self._read_cpu([self._coordinator, *self._shards, *workers])

    def _read_cpu(self, processes: Sequence[BaseProcess | Command]) -> float:
        """Update the CPU times of these processes. Return the CPU seconds that the whole job has used so far."""
        for process in processes:
            pid = process.pid or 0
            self._cpu_by_pid[pid] = max(self._cpu_by_pid.get(pid, 0.0), _cpu_seconds(process))
        return sum(self._cpu_by_pid.values())

    def _sample(self) -> None:
        """Sample the byte counters of the workers' hosts until the run stops."""
        while not self._stopped.wait(self._plan.sampled):
            for number, (process, _) in self._workers.items():
                with contextlib.suppress(OSError):
                    counters = _received_and_sent(process)
                    self._carried.setdefault(number, []).append((time.perf_counter(), *counters))

    def _check_model(self, events: Sequence[Event]) -> None:
        """Raise LabError unless the last model contains every applied update exactly once."""
        counts: dict[int, int] = {}
        for event in events:
            for worker in getattr(event, "workers", ()):
                counts[worker] = counts.get(worker, 0) + 1
        models = [
            pipe.recv() for number, (_, pipe) in self._workers.items() if number not in self._killed and pipe.poll(10)
        ]
        if not models:
            raise LabError("No worker has returned the last model.")
        difference = synthetic_worker.difference(models[0], counts, self._spec.model_bytes)
        if difference:
            raise LabError(f"The last model does not match the applied updates: {difference}.")

    # Faults

    def _inject(self, fault: Fault) -> None:
        number = fault.worker
        process, _ = self._workers[number]
        host = worker_host(number)
        if fault.kind == "kill":
            self._killed.add(number)
            self._read_cpu([process])
            process.kill()
        elif fault.kind == "rejoin":
            self._killed.discard(number)
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


def _received_and_sent(process: BaseProcess | Command) -> tuple[int, int]:
    """Return the bytes that the host of a process has received and sent since the lab was built."""
    lines = Path(f"/proc/{process.pid}/net/dev").read_text().splitlines()
    fields = next(line for line in lines if line.strip().startswith("eth0:")).partition(":")[2].split()
    return int(fields[0]), int(fields[8])


def _cpu_seconds(process: BaseProcess | Command) -> float:
    """Return the CPU seconds that a process has used, in user and in kernel mode. 0 if it has ended."""
    try:
        return cpu_seconds(process.pid or 0)
    except OSError:
        return 0.0
