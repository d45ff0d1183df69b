"""A whole job in one process: real sockets, a thread for each shard and worker. For tests that need no processes."""

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
    """A server that is up."""

    def __init__(self, address: str, coordinator: Coordinator, events: list[Event]) -> None:
        self.address, self.coordinator, self.events = address, coordinator, events

    def finish(self) -> None:
        """Wait until the coordinator has heard that everybody has left."""
        for _ in range(500):
            if self.coordinator.done.is_set():
                return
            time.sleep(0.01)
        raise AssertionError("somebody is still there")

    def work(self, *workers: Callable[[str], Any]) -> list[Any]:
        """Run workers side by side; what each returned. An error of one is an error of all."""
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
            thread.join(60.0)
            assert not thread.is_alive(), "a worker hangs"
        if errors:
            raise errors[0]
        return results


def hold(number: int, endpoint: Endpoint, token: bytes, errors: list[BaseException]) -> None:
    """A shard. A job may be over before it has begun."""
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
    **more: Any,
) -> Iterator[Job]:
    """Serve a job on this machine; it begins when so many workers have come."""
    events: list[Event] = []
    up: list[Job] = []
    holders: list[threading.Thread] = []
    errors: list[BaseException] = []
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        restored = more.pop("restored", None)
        config = ServerConfig(
            shards, workers, token, lease, policy=str(policy), tls=tls.listening() if tls else None, **more
        )
        made = make(policy) if isinstance(policy, str) else policy
        coordinator = Coordinator(made, config, Recorder(events.append), restored)
        endpoint = Endpoint("127.0.0.1", await coordinator.listen(), config.shard_token or token, tls)
        for number in range(shards):
            holders.append(threading.Thread(target=hold, args=(number, endpoint, token, errors), daemon=True))
            holders[-1].start()
        await coordinator.shards.complete.wait()
        up.append(Job(f"127.0.0.1:{endpoint.port}", coordinator, events))
        ready.set()
        await asyncio.to_thread(over.wait)
        await coordinator.save()
        await coordinator.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(30.0), f"{errors}\n{_stacks()}"
    try:
        yield up[0]
    finally:
        over.set()
        thread.join(30.0)
        for holder in holders:  # they may be writing a recording's end
            holder.join(30.0)


def _stacks() -> str:
    """Where every thread stands."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
