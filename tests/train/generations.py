"""A complete server in one process, with a thread for each shard, that goes from one generation to the next."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from paceline.observe.observer import Recorder
from paceline.observe.trace import Event
from paceline.policies import make
from paceline.serve.coordinator.config import ServerConfig
from paceline.serve.server import Server
from paceline.serve.shard.shard import Shard
from paceline.serve.wire.endpoint import Endpoint
from train.jobs import Job


class ThreadOfShard(threading.Thread):
    """A shard in a thread, with the interface of a process."""

    started: ClassVar[list[ThreadOfShard]] = []  # all of them, for tests that look into their shards

    def __init__(self, number: int, endpoint: Endpoint, token: bytes, replica: int) -> None:
        super().__init__(daemon=True)
        self._arguments = number, endpoint, token, replica
        self.shard: Shard | None = None
        self.started.append(self)
        self.returncode: int | None = None
        self.start()

    def run(self) -> None:
        number, endpoint, token, replica = self._arguments
        self.shard = Shard(number, endpoint, token=token, replica=replica)
        self.shard.run()
        self.returncode = 0

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.is_alive():
            raise subprocess.TimeoutExpired("shard", timeout or 0.0)
        return 0

    def kill(self) -> None:
        raise AssertionError("a shard does not stop")


class ServerInThreads(Server):
    """A server whose shards are threads of this process."""

    def _start_shard(self, number: int, threads: int, replica: int) -> Any:
        config = self._config
        endpoint = Endpoint("127.0.0.1", self.port, config.shard_token or config.token)
        return ThreadOfShard(number, endpoint, config.token, replica)


@contextmanager
def served(policy: str, shards: int = 1, workers: int = 1, **more: Any) -> Iterator[Job]:
    """Serve a job that may begin again. `Job.coordinator` is that of the newest generation at the end."""
    events: list[Event] = []
    started: list[tuple[ServerInThreads, asyncio.AbstractEventLoop]] = []
    ready = threading.Event()
    failures: list[BaseException] = []

    async def serve() -> None:
        resume = more.pop("resume", None)
        config = ServerConfig(shards, workers, policy=policy, **more)
        server = ServerInThreads(lambda: make(policy), config, observer=Recorder(events.append), resume=resume)
        await server.start()
        started.append((server, asyncio.get_running_loop()))
        ready.set()
        try:
            await server.serve()
        except BaseException as error:
            failures.append(error)
        finally:
            await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(30.0)
    server, loop = started[0]
    running = Job(f"127.0.0.1:{server.port}", server.coordinator, events)
    try:
        yield running
    except BaseException:
        loop.call_soon_threadsafe(server.coordinator.done.set)
        raise
    finally:
        thread.join(30.0)
        running.coordinator = server.coordinator
        assert not thread.is_alive() and not failures, failures
