"""The processes of the workers, and of shards that the server does not start itself: start, restart and stop."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.launch.attempt import Attempt
from paceline.launch.processes import JobError, Printer, ending, heard, lines, start, stop
from paceline.serve import cores
from paceline.serve.environment import (
    ASKED_TO_LEAVE,
    CONNECT,
    LAUNCHED,
    LOST,
    RANK,
    RANKS,
    REDUCE,
    REFUSED,
    RUN,
    TOKEN,
    WORK,
    WORKER,
    address,
)
from paceline.serve.restarts import RestartBudget, RestartLimit
from paceline.serve.wire.messages import ANY_NUMBER
from paceline.serve.wire.tokens import Role, token_for

EVERYWHERE = "0.0.0.0"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
SSH_FAILED = 255  # the exit code of ssh if it cannot connect
PAUSE = 0.5  # seconds before a shard is restarted
RANK_SECONDS = 2.0  # seconds that the other ranks of a worker have to print their own errors after one has failed
MAX_FAILURES = 3  # consecutive failures of a shard that end the job


class Place(NamedTuple):
    """The host that a process runs on."""

    host: str = ""  # to reach over ssh; empty: this host
    processes: int = 1  # that share its cores


@dataclass(frozen=True)
class WorkerCommand:
    """The command that every worker runs, and the hosts on which it runs."""

    script: Sequence[str]
    connect: str
    token: bytes
    environment: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1  # processes per worker
    reduce: str = ""  # the collective by which the ranks sum their gradients
    hosts: Sequence[str] = ()  # hosts to reach over ssh, used in turn; this host if empty
    python: str = sys.executable
    workers: int = 1  # on all hosts together; 0: there are only shards
    server_hosts: Sequence[str] = ()  # hosts of the shards, used in turn; beside the workers if empty
    shards: int = 1  # on all of them together
    listen: str = ""  # the address that shards listen on; empty: loopback, or all addresses for a server elsewhere
    leaves: bool = False  # whether SIGTERM asks a worker to leave after its push; otherwise it ends the worker at once

    def place_of_worker(self, label: int) -> Place:
        """Return where a worker runs. Its processes share the cores with those of the other workers there."""
        place = _in_turn(self.hosts, label, self.workers)
        return place._replace(processes=self.ranks * place.processes)

    def place_of_shard(self, number: int, replica: int) -> Place:
        """Return where a shard runs: on a server's host, or beside a worker. A backup runs one place further on."""
        if self.server_hosts:
            return _in_turn(self.server_hosts, number + replica, self.shards)
        return self.place_of_worker((number + replica) % self.workers) if self.workers else Place()


class WorkerSupervisor:
    """Runs the workers and restarts those that crash, all together as often as the limit allows.

    One more crash ends the job. A worker that ends with an error before its first update would do so again, so it is
    not restarted.
    """

    def __init__(self, task: WorkerCommand, restarts: RestartLimit, say: Printer) -> None:
        self._task, self._restarts, self._say = task, RestartBudget(restarts), say
        self.over = False  # whether the server has ended, so that a restarted worker would have no job
        self._processes: dict[int, list[asyncio.subprocess.Process]] = {}
        self._attempts: dict[int, Attempt] = {}
        self._crashes: dict[int, tuple[int, str]] = {}  # the exit code and the description of a worker's last crash
        self._shards: dict[tuple[int, int], asyncio.subprocess.Process] = {}  # by shard and replica
        self._stopping = False  # whether nothing is to be restarted
        self.has_left = False  # whether a worker was asked to leave

    async def keep(self, number: int | None, label: int) -> None:
        """Run a worker until it ends, and restart it if it crashes.

        number: the worker's number, or None if the coordinator chooses one. label: its number in this supervisor.
        """
        while True:
            attempt = self._attempts[label] = Attempt()
            processes = self._processes[label] = [
                await self._start(number, label, rank, port)
                for port in [_free_port() if self._task.ranks > 1 else 0]
                for rank in range(self._task.ranks)
            ]
            readers = self._start_reading(processes, f"{label}", attempt)
            if self._is_late(label):
                await stop(processes)
            code = await self._first_failure(processes)
            await stop(processes)
            await heard(readers)
            if self._task.leaves and code == ASKED_TO_LEAVE:
                self.has_left = True
                return
            if code == 0 or self._stopping:
                return
            if self._is_late(label):
                self._end_late(label)
                return
            if not (self._may_help(label, code, attempt) and self._restarts.spend(time.monotonic())):
                self._stopping = True
                raise JobError(self._final_message(label, code, attempt))
            if attempt.error and code == LOST:
                self._crashes[label] = code, f"Worker {label}: {attempt.error}"
                self._say(f"Worker {label}: {attempt.error} Restarting it.", aside=True)
            else:
                self._crashes[label] = code, f"Worker {label} {ending(code)}.{attempt.quoted()}"
                self._say(f"Worker {label} {ending(code)}; restarting it.", aside=True)

    async def end_with_server(self) -> None:
        """Restart no worker from now on, and stop those that were restarted too late to join: the job is done."""
        self.over = True
        late = [each for label, processes in self._processes.items() if self._is_late(label) for each in processes]
        await stop(late)

    def _is_late(self, label: int) -> bool:
        """Return whether a worker was restarted, and has not joined before the job was done."""
        return self.over and label in self._crashes and not self._attempts[label].joined

    def _end_late(self, label: int) -> None:
        """Raise JobError if the worker had ended with an error. If it was killed, the others have done its part."""
        code, crash = self._crashes[label]
        if not self._was_killed(code):
            self._stopping = True
            raise JobError(crash)
        self._say(f"The job was done before worker {label} was back.", aside=True)

    def _may_help(self, label: int, code: int, attempt: Attempt) -> bool:
        """Return whether a restart may help. A restarted worker may lose the server before its first update."""
        if self.over or code == REFUSED or self._is_unreachable(label, code, attempt):
            return False
        return attempt.updated or self._was_killed(code) or (code == LOST and label in self._crashes)

    def _is_unreachable(self, label: int, code: int, attempt: Attempt) -> bool:
        """Return whether ssh has failed before the worker joined for the first time."""
        return bool(self._task.hosts) and code == SSH_FAILED and not attempt.joined and label not in self._crashes

    def _was_killed(self, code: int) -> bool:
        """Return whether a signal has ended a process. Over ssh, that is a code above 127; so is a lost connection."""
        return code < 0 or (bool(self._task.hosts) and code > 127)

    def _final_message(self, label: int, code: int, attempt: Attempt) -> str:
        """Return the reason of the failure, and at its end the script's own exception if there was one."""
        if attempt.error and code in (REFUSED, LOST):
            _, earlier = self._crashes.get(label, (0, ""))
            return f"{attempt.error} Before that: {earlier}" if earlier else attempt.error
        if self._is_unreachable(label, code, attempt):
            host = self._task.hosts[label % len(self._task.hosts)]
            return (
                f"ssh could not start worker {label} on {host}: try `ssh {host}`, or correct --hosts.{attempt.quoted()}"
            )
        end = f"Worker {label} {ending(code)}"
        if self._may_help(label, code, attempt):
            often = f" after workers were restarted {self._restarts.used}" if self._restarts.count else ""
            return f"{end}{often}; allow more restarts with --restarts.{attempt.quoted()}"
        early = "" if self.over or attempt.updated else " before its first update, so it is not restarted"
        return f"{end}{early}.{attempt.quoted()}"

    async def keep_shard(self, number: int | None, replica: int = 0, patience: float | None = None) -> None:
        """Run a shard, and restart it until the job is over.

        number: None if the coordinator chooses one. replica: 1 for the shard's backup, which runs on the next host.
        patience: seconds without a server after which this gives up; None: never.
        """
        task = self._task
        host, port = address(task.connect)
        listen = task.listen or ("127.0.0.1" if host in LOOPBACK else EVERYWHERE)
        place, given = task.place_of_shard(number or 0, replica), ANY_NUMBER if number is None else number
        beside = bool(task.workers) and not task.server_hosts  # shares the cores with a worker
        label = "shard" if number is None else f"shard {number}"
        name = f"The shard beside worker {(given + replica) % task.workers}" if beside else label.capitalize()
        command = [task.python, "-m", "paceline.serve.shard", str(given), host, str(port), "--listen", listen]
        command += ["--threads", "1" if beside else "0", "--replica", str(replica)]
        failures, has_joined, last = 0, False, time.monotonic()
        while not (self._stopping or self.over):
            process = await self._launch(place, command, {**task.environment, LAUNCHED: "1"}, "shard")
            self._shards[given, replica] = process
            attempt = Attempt()
            readers = self._start_reading([process], label, attempt)
            code = await process.wait()
            await heard(readers)
            if code == 0 or self._stopping:
                return  # the job is over
            if attempt.joined:
                has_joined, last = True, time.monotonic()
            # Otherwise it was killed, or the server begins a new generation or is being restarted.
            failures = failures + 1 if code > 0 and code != LOST else 0
            reason = ""
            if place.host and code == SSH_FAILED and not has_joined:
                option = "--hosts" if beside else "--server-hosts"
                reason = f"ssh could not start {label} on {place.host}: try `ssh {place.host}`, or correct {option}."
            elif code == REFUSED and not has_joined:
                reason = f"{name} is refused: {attempt.error}"
            elif failures == MAX_FAILURES:
                why = f" {attempt.error}" if attempt.error else attempt.quoted()
                reason = f"{name} {ending(code)}, {failures} times in a row.{why}"
            elif patience is not None and time.monotonic() - last > patience:
                reason = f"There is no server at {task.connect}: start it, or correct its address."
            if reason:
                self._stopping = True
                raise JobError(reason)
            await asyncio.sleep(PAUSE)

    async def keep_all(self, numbers: Sequence[int | None], colocate: bool) -> None:
        """Run these workers until they end.

        colocate: run a shard beside each. Workers of other hosts may need it after the workers here have ended.
        """
        workers = asyncio.gather(*(self.keep(number, label) for label, number in enumerate(numbers)))
        known = [number for number in numbers if number is not None]
        shards = asyncio.gather(*(self.keep_shard(number) for number in known)) if colocate else None
        try:
            if shards:
                await asyncio.wait((workers, shards), return_when=asyncio.FIRST_COMPLETED)
                if shards.done():
                    shards.result()  # raises: shards end before the workers only with an error
            await workers
            if shards and not self.has_left:
                self.over = True
                await shards
        finally:
            started = [each for each in (workers, shards) if each]
            for each in started:
                each.cancel()
            await asyncio.gather(*started, return_exceptions=True)

    def ask_to_leave(self) -> None:
        """Pass SIGTERM on to the workers: each leaves the job after its push. Restart none."""
        self._stopping = self.has_left = True
        for process in (each for group in self._processes.values() for each in group):
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)  # not to its group: it still needs processes that load its data

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End all processes that still run. number: the signal to the workers."""
        self._stopping = True
        await stop([process for group in self._processes.values() for process in group], number=number)
        await stop(list(self._shards.values()))

    async def _first_failure(self, processes: Sequence[asyncio.subprocess.Process]) -> int:
        """Return the first exit code that is not 0 soon after it is known, or 0 when all processes have ended.

        If one rank fails, others fail for that reason. The rank that ends with REFUSED or LOST has reported the reason.
        """
        for ended in asyncio.as_completed([process.wait() for process in processes]):
            code = await ended
            if code and len(processes) > 1:
                waiting = [asyncio.ensure_future(process.wait()) for process in processes]
                await asyncio.wait(waiting, timeout=RANK_SECONDS)
                known = {process.returncode for process in processes}
                return next((each for each in (REFUSED, LOST) if each in known), code)
            if code:
                return code
        return 0

    def _start_reading(
        self, processes: Sequence[asyncio.subprocess.Process], label: str, attempt: Attempt
    ) -> list[asyncio.Future[None]]:
        return [
            asyncio.ensure_future(self._read(stream, label, f"{label} {rank} {aside}", attempt, aside))
            for rank, each in enumerate(processes)
            for stream, aside in ((each.stdout, False), (each.stderr, True))
        ]

    async def _read(
        self, stream: asyncio.StreamReader | None, label: str, source: str, attempt: Attempt, aside: bool
    ) -> None:
        """Show the lines of a stream, and let the attempt take note of those of standard error (aside)."""
        prefix = f"[{label}] " if self._task.workers > 1 or not label.isdigit() else ""
        state = ""  # of a progress bar that is still being drawn
        async for line in lines(stream):
            if not line.stays:
                state = line.text
            elif aside and (self._stopping or not attempt.read(line.text)):
                continue
            else:
                state = ""
            shown = f"{prefix}{line.text}" if line.stays or line.text else ""
            self._say(shown, aside=aside, source=source, stays=line.stays)
        if state:
            self._say(f"{prefix}{state}", aside=aside, source=source)

    async def _start(self, number: int | None, label: int, rank: int, port: int) -> asyncio.subprocess.Process:
        task = self._task
        variables = {**task.environment, CONNECT: task.connect, LAUNCHED: WORK if task.leaves else RUN}
        if number is not None:
            variables[WORKER] = str(number)
        if task.ranks > 1:
            variables |= {RANK: str(rank), RANKS: str(task.ranks), REDUCE: task.reduce, "LOCAL_RANK": str(rank)}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return await self._launch(task.place_of_worker(label), [task.python, *task.script], variables, "worker")

    async def _launch(
        self, place: Place, command: Sequence[str], variables: Mapping[str, str], role: Role
    ) -> asyncio.subprocess.Process:
        """Start a command, with a token that allows no more than its role."""
        token = token_for(role, self._task.token).hex()
        if not place.host:
            environment = {**os.environ, **cores.settings(place.processes, os.environ), **variables, TOKEN: token}
            return await start(command, environment, capture=True)
        remote = remote_command(command, {**cores.chosen(os.environ), **variables}, place.processes)
        # "--": a host whose name begins with "-" would be an option of ssh, which can run any command.
        over_ssh = ["ssh", "-o", "BatchMode=yes", "--", place.host, remote]
        # The token is sent over standard input, because a command line is visible in the list of processes.
        return await start(over_ssh, os.environ, capture=True, feed=f"{token}\n".encode())


def remote_command(command: Sequence[str], variables: Mapping[str, str], processes: int = 1) -> str:
    """Return a shell command for another host that runs `command`, and ends it when the ssh connection is closed.

    processes: the number of processes that share the cores of that host.
    """
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    worker = shlex.join(command)
    return (
        f"cd {shlex.quote(os.getcwd())} && read -r {TOKEN} && export {TOKEN} && "
        f"{cores.remote_settings(processes, os.environ)} && exec 3<&0 && "
        f"{{ env {settings} {worker} </dev/null & worker=$!; "
        "{ cat; kill $worker; } <&3 >/dev/null 2>&1 & watcher=$!; "
        "wait $worker; code=$?; kill $watcher 2>/dev/null; exit $code; }"
    )


def _in_turn(hosts: Sequence[str], number: int, count: int) -> Place:
    """Return the host of one of `count` processes that use the hosts in turn, and how many of them run there."""
    known = hosts or [""]
    here = known[number % len(known)]
    return Place(here, sum(known[each % len(known)] == here for each in range(count)))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
