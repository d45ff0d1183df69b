"""The workers' processes, and shards beside them: started, started again when they crash, and stopped."""

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
LAST_WORDS = 15  # lines of a crashed worker that are shown again
PAUSE = 0.5  # seconds before a shard is started again
MAX_FAILURES = 3  # of a shard, in a row


@dataclass(frozen=True)
class WorkerCommand:
    """What every worker runs, and where."""

    script: Sequence[str]
    connect: str
    token: bytes
    environment: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1  # processes that make up one worker
    reduce: str = ""  # how they add up among themselves
    hosts: Sequence[str] = ()  # over ssh, worker after worker; empty: here
    python: str = sys.executable


class WorkerSupervisor:
    """Keeps workers at work. A crash is borne `restarts` times in all; one more ends the job."""

    def __init__(self, task: WorkerCommand, restarts: int, say: Printer) -> None:
        self._task, self._restarts, self._say = task, restarts, say
        self.over = False  # is the server done? Then there is nothing to come back to
        self._processes: dict[int, list[asyncio.subprocess.Process]] = {}
        self._shards: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = False  # then nobody is started again
        self._refusal = ""  # what is wrong, in a worker's words

    async def keep(self, number: int | None, label: int) -> None:
        """Run a worker to its end, and start it again if it crashes. number: None lets the coordinator choose."""
        while True:
            last_words: deque[str] = deque(maxlen=LAST_WORDS)
            processes = self._processes[label] = [
                await self._start(number, label, rank, port)
                for port in [_free_port() if self._task.ranks > 1 else 0]
                for rank in range(self._task.ranks)
            ]
            listening = self._listening(processes, f"{label}", last_words)
            code = await self._first_failure(processes)
            await stop(processes)
            await heard(listening)
            if code == 0 or self._stopping:
                return
            if code == REFUSED and self._refusal:
                self._stopping = True
                raise JobError(self._refusal)
            if self._restarts <= 0 or self.over:
                self._stopping = True
                raise JobError(f"Worker {label} {ending(code)}.{_quoted(last_words)}")
            self._restarts -= 1
            self._say(f"Worker {label} {ending(code)}; it is started again.", aside=True)

    async def attend(self, number: int) -> None:
        """Keep a shard up beside the worker of that number, as long as there is a server to call."""
        host, port = address(self._task.connect)
        listen = "127.0.0.1" if host in LOOPBACK else EVERYWHERE
        command = [self._task.python, "-m", "paceline.serve.shard", str(number), host, str(port), "--listen", listen]
        failures = 0
        while not (self._stopping or self.over):
            process = self._shards[number] = await self._launch(number, command, self._task.environment)
            last_words: deque[str] = deque(maxlen=LAST_WORDS)
            listening = self._listening([process], f"shard {number}", last_words)
            code = await process.wait()
            await heard(listening)
            failures = failures + 1 if code > 0 else 0  # without one it was killed, or the server is gone for now
            if failures == MAX_FAILURES:
                self._stopping = True
                again = f"{ending(code)}, {failures} times in a row"
                raise JobError(f"The shard beside worker {number} {again}.{_quoted(last_words)}")
            await asyncio.sleep(PAUSE)

    async def keep_all(self, numbers: Sequence[int | None], colocate: bool) -> None:
        """Run these workers to their end. colocate: keep a shard up beside each; others may need it for longer."""
        working = asyncio.gather(*(self.keep(number, label) for label, number in enumerate(numbers)))
        known = [number for number in numbers if number is not None]
        beside = asyncio.gather(*(self.attend(number) for number in known)) if colocate else None
        try:
            if beside:
                await asyncio.wait((working, beside), return_when=asyncio.FIRST_COMPLETED)
                if beside.done():
                    beside.result()  # its error: before the workers, it does not end otherwise
            await working
            if beside:
                self.over = True
                await beside
        finally:
            at_work = [each for each in (working, beside) if each]
            for each in at_work:
                each.cancel()
            await asyncio.gather(*at_work, return_exceptions=True)

    async def stop(self) -> None:
        """End whoever still runs."""
        self._stopping = True
        workers = [process for group in self._processes.values() for process in group]
        await stop([*workers, *self._shards.values()])

    async def _first_failure(self, processes: Sequence[asyncio.subprocess.Process]) -> int:
        """0 when all have ended well; otherwise the first code that is not 0, as soon as it is known."""
        for ended in asyncio.as_completed([process.wait() for process in processes]):
            code = await ended
            if code:
                return code
        return 0

    def _listening(
        self, processes: Sequence[asyncio.subprocess.Process], label: str, last_words: deque[str]
    ) -> list[asyncio.Future[None]]:
        return [
            asyncio.ensure_future(self._listen(stream, label, last_words, aside))
            for each in processes
            for stream, aside in ((each.stdout, False), (each.stderr, True))
        ]

    async def _listen(
        self, stream: asyncio.StreamReader | None, label: str, last_words: deque[str], aside: bool
    ) -> None:
        async for line in lines(stream):
            if aside and line.startswith(REFUSAL):
                self._refusal = line.removeprefix(REFUSAL)
                continue  # said once, at the end
            if aside:
                last_words.append(line)
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
        """Run a command where that worker is."""
        hosts, token = self._task.hosts, self._task.token.hex()
        if not hosts:
            return await start(command, {**os.environ, **variables, TOKEN: token}, capture=True)
        over_ssh = ["ssh", "-o", "BatchMode=yes", hosts[label % len(hosts)], remote_command(command, variables)]
        # The token goes over standard input, where no list of processes shows it.
        return await start(over_ssh, os.environ, capture=True, feed=f"{token}\n".encode())


def remote_command(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """What a shell on another host is to do: run it, and end it when our end of the connection is gone."""
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    worker = shlex.join(command)
    return (
        f"cd {shlex.quote(os.getcwd())} && read -r {TOKEN} && export {TOKEN} && exec 3<&0 && "
        f"{{ env {settings} {worker} </dev/null & worker=$!; "
        "{ cat; kill $worker; } <&3 >/dev/null 2>&1 & watcher=$!; "
        "wait $worker; code=$?; kill $watcher 2>/dev/null; exit $code; }"
    )


def _quoted(last_words: Sequence[str]) -> str:
    words = "".join(f"\n  {line}" for line in last_words)
    return f" Its last words:{words}" if words else ""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
