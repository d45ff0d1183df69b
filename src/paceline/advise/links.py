"""Measures the links between hosts, in a lab or between real machines over ssh.

Both use the same commands: `python -m paceline.launch.link_probe serve` on one host and `call` on another.
"""

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

SECONDS = 0.7  # duration of a stream, in each direction
PATIENCE = 60.0  # seconds to wait for a line from a probe
PROBE = ("-m", "paceline.launch.link_probe")


@dataclass(frozen=True)
class Links:
    """The measured links of a cluster."""

    server: float  # bytes per second of a server's link
    workers: tuple[float, ...]  # bytes per second of each worker's link
    latency: float  # seconds, one way


class HostAccess(Protocol):
    """A way to reach hosts and to start commands on them."""

    def address(self, host: str) -> str:
        """Return the address at which the other hosts reach this one."""

    def command(self, host: str, arguments: Sequence[str], token: bytes) -> tuple[list[str], Mapping[str, str], bytes]:
        """Return what starts Python with these arguments on the host: command line, environment, standard input."""


class LabAccess:
    """Access to the hosts of a lab."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def address(self, host: str) -> str:
        return self._lab.address(host)

    def command(self, host: str, arguments: Sequence[str], token: bytes) -> tuple[list[str], Mapping[str, str], bytes]:
        command = self._lab.command(host, [sys.executable, *arguments])
        return command, {**os.environ, TOKEN: token.hex()}, b""


HERE = ""  # the name of this machine


class SshAccess:
    """Access to machines over ssh, as `paceline run --hosts` has it. HERE stands for this machine."""

    def address(self, host: str) -> str:
        return host.rpartition("@")[2]

    def command(self, host: str, arguments: Sequence[str], token: bytes) -> tuple[list[str], Mapping[str, str], bytes]:
        if host == HERE:
            return [sys.executable, *arguments], {**os.environ, TOKEN: token.hex()}, b""
        remote = remote_command([sys.executable, *arguments], {})
        return ["ssh", "-o", "BatchMode=yes", "--", host, remote], os.environ, f"{token.hex()}\n".encode()


async def measure_links(
    access: HostAccess, server: str, workers: Sequence[str], progress: Callable[[float], None] | None = None
) -> Links:
    """Measure the server's link and each worker's link.

    A stream is as fast as the slower of its two ends. So a worker's rate is that of its fastest stream, to the server
    or to a neighbouring worker. The server's rate is the total of streams to all workers at once.
    """
    count = len(workers)
    ring = list(zip(workers, [*workers[1:], workers[0]], strict=True)) if count > 2 else [(workers[0], workers[-1])]
    pairs = [(server, worker) for worker in workers] + (ring if count > 1 else [])
    best: dict[str, float] = dict.fromkeys(workers, 0.0)
    latencies, single = [], 0.0
    for done, (caller, served) in enumerate(pairs):
        (link,) = await measure_between(access, caller, [served])
        latencies.append(link.latency)
        for host in {caller, served} & set(workers):
            best[host] = max(best[host], min(link.up, link.down))
        if server in (caller, served):
            single = max(single, min(link.up, link.down))
        if progress:
            progress((done + 1) / (len(pairs) + 1))
    together = await measure_between(access, server, workers)
    rates = sum(link.up for link in together), sum(link.down for link in together)
    return Links(
        _rounded(max(single, min(rates))),
        tuple(_rounded(best[host]) for host in workers),
        _rounded(statistics.median(latencies)),
    )


def _rounded(value: float) -> float:
    """Round a value to three digits, which is as precise as a stream measures."""
    return float(f"{value:.3g}")


async def measure_between(access: HostAccess, caller: str, served: Sequence[str]) -> list[LinkMeasurement]:
    """Measure the links from one host to others, with streams to all of them at the same time."""
    token = secrets.token_bytes(TOKEN_BYTES)
    async with AsyncExitStack() as stack:
        targets = []
        for host in served:
            process = await stack.enter_async_context(_running(access, host, ("serve",), token))
            targets.append(f"{access.address(host)}:{await _read_line(process, host)}")
        process = await stack.enter_async_context(
            _running(access, caller, ("call", ",".join(targets), str(SECONDS)), token)
        )
        return [LinkMeasurement(**each) for each in json.loads(await _read_line(process, caller))]


@asynccontextmanager
async def _running(access: HostAccess, host: str, arguments: Sequence[str], token: bytes) -> Any:
    command, environment, feed = access.command(host, (*PROBE, *arguments), token)
    process = await start(command, environment, capture=True, feed=feed)
    try:
        yield process
    finally:
        await stop([process])


async def _read_line(process: asyncio.subprocess.Process, host: str) -> str:
    """Return the next line that a probe prints. Raise JobError if there is none."""
    assert process.stdout and process.stderr
    try:
        line = await asyncio.wait_for(process.stdout.readline(), PATIENCE)
    except TimeoutError:
        raise JobError(
            f"The link of {host or 'this machine'} could not be measured: the probe did not answer."
        ) from None
    if not line:
        complaints = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
        why = complaints[-1] if complaints else "the probe ended without a message"
        raise JobError(f"The link of {host or 'this machine'} could not be measured: {why.rstrip('.')}.")
    return line.decode().strip()
