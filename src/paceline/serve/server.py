"""A whole parameter server on this machine: the coordinator in this process, and each shard in one of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable

from paceline.observe.observer import Observer
from paceline.policies import make
from paceline.serve.coordinator import Coordinator

TOKEN = "PACELINE_TOKEN"  # the variable that carries the job's token to processes we start


async def serve(
    policy: str,
    shards: int = 1,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: bytes = b"",
    lease: float = 30.0,
    workers: int = 1,
    observer: Observer | None = None,
    listening: Callable[[int], None] = lambda port: None,
) -> None:
    """Serve one job: until every worker that took part has left. `listening` hears the port."""
    coordinator = Coordinator(make(policy), shards, token, lease, observer, workers)
    bound = await coordinator.listen(host, port)
    processes = [_start_shard(number, bound, token) for number in range(shards)]
    try:
        listening(bound)
        await coordinator.done.wait()
    finally:
        await coordinator.close()
        for process in processes:
            try:
                await asyncio.to_thread(process.wait, 5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start_shard(number: int, port: int, token: bytes) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "paceline.serve.shard", str(number), "127.0.0.1", str(port)]
    return subprocess.Popen(command, env=os.environ | {TOKEN: token.hex()})
