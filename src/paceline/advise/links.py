"""The links between hosts, measured: in a lab, or between real hosts over ssh, by the same commands."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.lab.namespaces import Lab
from paceline.launch.link_probe import TOKEN_BYTES, LinkMeasurement
from paceline.launch.processes import JobError, start, stop
from paceline.launch.supervisor import remote_command
from paceline.serve.environment import TOKEN

SECONDS = 0.7  # that a stream runs, each way
PATIENCE = 60.0
PROBE = ("-m", "paceline.launch.link_probe")


@dataclass(frozen=True)
class Links:
    """What was measured."""

    server: float  # bytes per second of a server's link
    workers: tuple[float, ...]
    latency: float  # seconds, one way


class HostAccess(Protocol):
    """How hosts are reached."""

    def address(self, host: str) -> str:
        """Where the others find it."""

    def command(self, host: str, arguments: Sequence[str], token: bytes) -> tuple[list[str], Mapping[str, str], bytes]:
        """What runs python with these arguments there: a command line, its environment, and what it is fed."""


class LabAccess:
    """Hosts of a lab."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def address(self, host: str) -> str:
        return self._lab.address(host)

    def command(self, host: str, arguments: Sequence[str], token: bytes) -> tuple[list[str], Mapping[str, str], bytes]:
        command = self._lab.command(host, [sys.executable, *arguments])
        return command, {**os.environ, TOKEN: token.hex()}, b""


HERE = ""


class SshAccess:
    """Machines that are reached over ssh, as those of `paceline run --hosts`; HERE is this one."""

    def address(self, host: str) -> str:
        return host.rpartition("@")[2]

    def command(self, host: str, arguments: Sequence[str], token: bytes) -> tuple[list[str], Mapping[str, str], bytes]:
        if host == HERE:
            return [sys.executable, *arguments], {**os.environ, TOKEN: token.hex()}, b""
        remote = remote_command([sys.executable, *arguments], {})
        return ["ssh", "-o", "BatchMode=yes", host, remote], os.environ, f"{token.hex()}\n".encode()


async def measured(
    reach: HostAccess, server: str, workers: Sequence[str], progress: Callable[[float], None] | None = None
) -> Links:
    """A server's link and each worker's.

    A stream is as fast as the slower of its two ends. So a worker's link is the fastest stream that it had, with the
    server or with the worker next to it; and the server's is what all workers get from it together.
    """
    count = len(workers)
    beside = list(zip(workers, [*workers[1:], workers[0]], strict=True)) if count > 2 else [(workers[0], workers[-1])]
    pairs = [(server, worker) for worker in workers] + (beside if count > 1 else [])
    best: dict[str, float] = dict.fromkeys(workers, 0.0)
    latencies, single = [], 0.0
    for done, (caller, served) in enumerate(pairs):
        stretch = (await between(reach, caller, [served]))[0]
        latencies.append(stretch.latency)
        for host in {caller, served} & set(workers):
            best[host] = max(best[host], min(stretch.up, stretch.down))
        if server in (caller, served):
            single = max(single, min(stretch.up, stretch.down))
        if progress:
            progress((done + 1) / (len(pairs) + 1))
    together = await between(reach, server, workers)
    rates = sum(stretch.up for stretch in together), sum(stretch.down for stretch in together)
    return Links(
        _rounded(max(single, min(rates))),
        tuple(_rounded(best[host]) for host in workers),
        _rounded(statistics.median(latencies)),
    )


def _rounded(value: float) -> float:
    """To three digits: a stream tells no more."""
    return float(f"{value:.3g}")


async def between(reach: HostAccess, caller: str, served: Sequence[str]) -> list[LinkMeasurement]:
    """The stretches from one host to others, all used at the same time."""
    token = secrets.token_bytes(TOKEN_BYTES)
    async with AsyncExitStack() as stack:
        targets = []
        for host in served:
            process = await stack.enter_async_context(_running(reach, host, ("serve",), token))
            targets.append(f"{reach.address(host)}:{await _line(process, host)}")
        process = await stack.enter_async_context(
            _running(reach, caller, ("call", ",".join(targets), str(SECONDS)), token)
        )
        return [LinkMeasurement(**each) for each in json.loads(await _line(process, caller))]


@asynccontextmanager
async def _running(reach: HostAccess, host: str, arguments: Sequence[str], token: bytes) -> Any:
    command, environment, feed = reach.command(host, (*PROBE, *arguments), token)
    process = await start(command, environment, capture=True, feed=feed)
    try:
        yield process
    finally:
        await stop([process])


async def _line(process: asyncio.subprocess.Process, host: str) -> str:
    """The line that it prints."""
    assert process.stdout and process.stderr
    try:
        line = await asyncio.wait_for(process.stdout.readline(), PATIENCE)
    except TimeoutError:
        raise JobError(f"The link of {host or 'this machine'} could not be measured: it did not answer.") from None
    if not line:
        said = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
        why = said[-1] if said else "it ended without a word"
        raise JobError(f"The link of {host or 'this machine'} could not be measured: {why.rstrip('.')}.")
    return line.decode().strip()
