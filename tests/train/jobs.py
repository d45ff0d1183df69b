"""A complete job in one process, with real sockets and a thread for each shard and worker."""

from __future__ import annotations

import asyncio
import faulthandler
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.observe.observer import Recorder
from paceline.observe.trace import Event
from paceline.policies import Policy, make
from paceline.serve.coordinator.config import ServerConfig
from paceline.serve.coordinator.coordinator import Coordinator
from paceline.serve.shard.shard import Shard
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.tls import Tls


class Job:
    """A running server."""

    def __init__(self, address: str, coordinator: Coordinator, events: list[Event]) -> None:
        self.address, self.coordinator, self.events = address, coordinator, events

    def finish(self) -> None:
        """Wait until the coordinator knows that all workers have left."""
        for _ in range(500):
            if self.coordinator.done.is_set():
                return
            time.sleep(0.01)
        raise AssertionError("a worker is still in the job")

    def work(self, *workers: Callable[[str], Any], seconds: float = 60.0) -> list[Any]:
        """Run workers in parallel, and return their results. If one fails, raise its error."""
        results: list[Any] = [None] * len(workers)
        errors: list[BaseException] = []

        def run(number: int) -> None:
            try:
                results[number] = workers[number](self.address)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(workers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds)
            if errors:  # the others may wait for the one that has failed
                seconds = min(seconds, 10.0)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), "a worker hangs"
        return results


def run_shard(number: int, endpoint: Endpoint, token: bytes, errors: list[BaseException]) -> None:
    """Run a shard. A connection error is expected if the job ends before the shard has connected."""
    try:
        Shard(number, endpoint, token=token).run()
    except BaseException as error:
        errors.append(error)
        if not isinstance(error, OSError):
            raise


@contextmanager
def job(
    policy: str | Policy,
    shards: int = 1,
    workers: int = 1,
    lease: float = 30.0,
    token: bytes = b"",
    tls: Tls | None = None,
    shard_tls: Tls | None = None,
    **more: Any,
) -> Iterator[Job]:
    """Serve a job in this process. It starts when `workers` workers have joined.

    shard_tls: the TLS files of the shards, if they are not the server's.
    """
    events: list[Event] = []
    started: list[Job] = []
    shard_threads: list[threading.Thread] = []
    errors: list[BaseException] = []
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        restored = more.pop("restored", None)
        config = ServerConfig(
            shards, workers, token, lease, policy=str(policy), tls=tls.listening() if tls else None, **more
        )
        chosen = make(policy) if isinstance(policy, str) else policy
        coordinator = Coordinator(chosen, config, Recorder(events.append), restored)
        endpoint = Endpoint("127.0.0.1", await coordinator.listen(), config.shard_token or token, shard_tls or tls)
        for number in range(shards):
            shard = threading.Thread(target=run_shard, args=(number, endpoint, token, errors), daemon=True)
            shard_threads.append(shard)
            shard.start()
        await coordinator.shards.complete.wait()
        started.append(Job(f"127.0.0.1:{endpoint.port}", coordinator, events))
        ready.set()
        await asyncio.to_thread(over.wait)
        await coordinator.save()
        await coordinator.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(30.0), f"{errors}\n{_stacks()}"
    try:
        yield started[0]
    finally:
        over.set()
        thread.join(30.0)
        for shard in shard_threads:  # a shard may still be writing the end of a recording
            shard.join(30.0)


def _stacks() -> str:
    """Return the stack of every thread."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
