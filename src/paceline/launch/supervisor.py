"""The processes of the workers and of the shards beside them: start, restart after a crash, and stop."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.launch.processes import JobError, Printer, ending, heard, lines, start, stop
from paceline.serve.environment import CONNECT, LAUNCHED, RANK, RANKS, REDUCE, REFUSAL, REFUSED, TOKEN, WORKER, address

EVERYWHERE = "0.0.0.0"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LAST_LINES = 15  # lines of a crashed worker's output that its error repeats
PAUSE = 0.5  # seconds before a shard is restarted
MAX_FAILURES = 3  # consecutive failures of a shard that end the job


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


class WorkerSupervisor:
    """Runs the workers and restarts those that crash, up to `restarts` times in total. One more crash ends the job."""

    def __init__(self, task: WorkerCommand, restarts: int, say: Printer) -> None:
        self._task, self._restarts, self._say = task, restarts, say
        self.over = False  # whether the server has ended, so that a restarted worker would have no job
        self._processes: dict[int, list[asyncio.subprocess.Process]] = {}
        self._shards: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = False  # whether nothing is to be restarted
        self._refusal = ""  # an error that a restart cannot fix, as a worker printed it

    async def keep(self, number: int | None, label: int) -> None:
        """Run a worker until it ends, and restart it if it crashes.

        number: the worker's number, or None if the coordinator chooses one. label: its number in this supervisor.
        """
        while True:
            last_lines: deque[str] = deque(maxlen=LAST_LINES)
            processes = self._processes[label] = [
                await self._start(number, label, rank, port)
                for port in [_free_port() if self._task.ranks > 1 else 0]
                for rank in range(self._task.ranks)
            ]
            readers = self._start_reading(processes, f"{label}", last_lines)
            code = await self._first_failure(processes)
            await stop(processes)
            await heard(readers)
            if code == 0 or self._stopping:
                return
            if code == REFUSED and self._refusal:
                self._stopping = True
                raise JobError(self._refusal)
            if self._restarts <= 0 or self.over:
                self._stopping = True
                raise JobError(f"Worker {label} {ending(code)}.{_quoted(last_lines)}")
            self._restarts -= 1
            self._say(f"Worker {label} {ending(code)}; restarting it.", aside=True)

    async def keep_shard(self, number: int) -> None:
        """Run a shard beside the worker of this number, and restart it until the server has ended."""
        host, port = address(self._task.connect)
        listen = "127.0.0.1" if host in LOOPBACK else EVERYWHERE
        command = [self._task.python, "-m", "paceline.serve.shard", str(number), host, str(port), "--listen", listen]
        failures = 0
        while not (self._stopping or self.over):
            process = self._shards[number] = await self._launch(number, command, self._task.environment)
            last_lines: deque[str] = deque(maxlen=LAST_LINES)
            readers = self._start_reading([process], f"shard {number}", last_lines)
            code = await process.wait()
            await heard(readers)
            failures = failures + 1 if code > 0 else 0  # otherwise it was killed, or the server is restarting
            if failures == MAX_FAILURES:
                self._stopping = True
                again = f"{ending(code)}, {failures} times in a row"
                raise JobError(f"The shard beside worker {number} {again}.{_quoted(last_lines)}")
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
            if shards:
                self.over = True
                await shards
        finally:
            started = [each for each in (workers, shards) if each]
            for each in started:
                each.cancel()
            await asyncio.gather(*started, return_exceptions=True)

    async def stop(self) -> None:
        """End all processes that still run."""
        self._stopping = True
        workers = [process for group in self._processes.values() for process in group]
        await stop([*workers, *self._shards.values()])

    async def _first_failure(self, processes: Sequence[asyncio.subprocess.Process]) -> int:
        """Return the first exit code that is not 0 as soon as it is known, or 0 when all processes have ended."""
        for ended in asyncio.as_completed([process.wait() for process in processes]):
            code = await ended
            if code:
                return code
        return 0

    def _start_reading(
        self, processes: Sequence[asyncio.subprocess.Process], label: str, last_lines: deque[str]
    ) -> list[asyncio.Future[None]]:
        return [
            asyncio.ensure_future(self._read(stream, label, last_lines, aside))
            for each in processes
            for stream, aside in ((each.stdout, False), (each.stderr, True))
        ]

    async def _read(self, stream: asyncio.StreamReader | None, label: str, last_lines: deque[str], aside: bool) -> None:
        """Show the lines of a stream, and collect those of standard error (aside)."""
        async for line in lines(stream):
            if aside and line.startswith(REFUSAL):
                self._refusal = line.removeprefix(REFUSAL)
                continue  # shown once, as the error of the job
            if aside:
                last_lines.append(line)
            self._say(f"[{label}] {line}", aside=aside)

    async def _start(self, number: int | None, label: int, rank: int, port: int) -> asyncio.subprocess.Process:
        task = self._task
        variables = {**task.environment, CONNECT: task.connect, LAUNCHED: "1"}
        if number is not None:
            variables[WORKER] = str(number)
        if task.ranks > 1:
            variables |= {RANK: str(rank), RANKS: str(task.ranks), REDUCE: task.reduce, "LOCAL_RANK": str(rank)}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return await self._launch(label, [task.python, *task.script], variables)

    async def _launch(
        self, label: int, command: Sequence[str], variables: Mapping[str, str]
    ) -> asyncio.subprocess.Process:
        """Start a command on the host of this worker."""
        hosts, token = self._task.hosts, self._task.token.hex()
        if not hosts:
            return await start(command, {**os.environ, **variables, TOKEN: token}, capture=True)
        over_ssh = ["ssh", "-o", "BatchMode=yes", hosts[label % len(hosts)], remote_command(command, variables)]
        # The token is sent over standard input, because a command line is visible in the list of processes.
        return await start(over_ssh, os.environ, capture=True, feed=f"{token}\n".encode())


def remote_command(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return a shell command for another host that runs `command`, and ends it when the ssh connection is closed."""
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    worker = shlex.join(command)
    return (
        f"cd {shlex.quote(os.getcwd())} && read -r {TOKEN} && export {TOKEN} && exec 3<&0 && "
        f"{{ env {settings} {worker} </dev/null & worker=$!; "
        "{ cat; kill $worker; } <&3 >/dev/null 2>&1 & watcher=$!; "
        "wait $worker; code=$?; kill $watcher 2>/dev/null; exit $code; }"
    )


def _quoted(last_lines: Sequence[str]) -> str:
    text = "".join(f"\n  {line}" for line in last_lines)
    return f" Its last output:{text}" if text else ""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
