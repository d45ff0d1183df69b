"""A whole parameter server on this machine: the coordinator in this process, and each shard in one of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from paceline.observe.observer import Observer
from paceline.policies import make
from paceline.serve.coordinator import Coordinator
from paceline.serve.shard import TOKEN

STOPPING = 5.0  # seconds that a shard has to stop before it is killed


@asynccontextmanager
async def server(
    policy: str,
    shards: int = 1,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: bytes = b"",
    lease: float = 30.0,
    workers: int = 1,
    observer: Observer | None = None,
) -> AsyncIterator[tuple[Coordinator, int]]:
    """Serve a job: the coordinator and its port. On the way out everything that was started is stopped."""
    coordinator = Coordinator(make(policy), shards, token, lease, observer, workers)
    bound = await coordinator.listen(host, port)
    processes = [_start_shard(number, bound, token) for number in range(shards)]
    try:
        yield coordinator, bound
    finally:
        await coordinator.close()
        for process in processes:
            await asyncio.to_thread(_stop, process)


def _start_shard(number: int, port: int, token: bytes) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "paceline.serve.shard", str(number), "127.0.0.1", str(port)]
    # In a group of its own, so that a Ctrl-C reaches the coordinator first, which then stops the shards in order.
    return subprocess.Popen(command, env=os.environ | {TOKEN: token.hex()}, start_new_session=True)


def _stop(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(STOPPING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
