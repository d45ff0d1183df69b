"""A schedule carried out on torch.distributed, over gloo. Tensors on a GPU go through the host's memory.

Each process of the schedule has a thread, and a gloo group of its own with its peers at each level. Processes never
share a group, because their messages could be mixed up. The sends and receives of a step run at the same time. Elements
that are to be added are received into a separate buffer.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore

from paceline.collectives.algorithms import make
from paceline.collectives.schedule import ANY, Schedule, ScheduleProcess, Transfer
from paceline.collectives.shares import UNITS
from paceline.collectives.topology import Topology

TIMEOUT = 300.0  # seconds for which a rank may keep the others waiting
CHECK_SECONDS = 0.5  # seconds between two checks whether another rank has failed
FAILED_KEY = "failed"
ERROR_MARK = "!"
UNUSED_TAG = 1  # a tag with which nothing is ever sent
MAX_PLANS = 64  # plans that are cached, one for each number of elements


class CollectiveError(RuntimeError):
    """The ranks cannot add up their tensors. The message says why, and what to do."""


@dataclass(frozen=True)
class _RankStep:
    """The part of one rank in a step."""

    adds: bool
    sends: list[Transfer]
    receives: list[Transfer]


class AllReduce:
    """Adds up tensors over all ranks by a schedule. All ranks make one, and use it in the same order."""

    def __init__(
        self,
        net: Topology,
        rank: int,
        store: Any,
        algorithm: str = "hips",
        stages: Sequence[str] = ("ring",),
        *,
        timeout: float = TIMEOUT,
        nics: Mapping[int, str] | None = None,
    ) -> None:
        """Connect this rank to its peers.

        store: where the ranks meet; no other object may use its keys.
        nics: interfaces or addresses of this machine, by port of the topology. Without them, gloo chooses one.
        """
        self._net, self._rank, self._store = net, rank, store
        self._schedule: Callable[[int], Schedule] = lambda elements: make(algorithm, net, elements, stages)
        self._timeout, self._nics = timeout, nics or {}
        self._plans: dict[int, list[list[_RankStep]]] = {}
        self._failed = ""
        self._pending: set[torch.futures.Future[torch.Tensor]] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        if not 0 <= rank < net.servers:
            raise CollectiveError(f"{net.name} has {net.servers} servers; there is no rank {rank}.")
        shape = self._schedule(net.servers**2 * net.ports * UNITS * net.levels)  # each transfer has elements
        self._agree(f"{algorithm} ({'/'.join(stages)}) on {net.name}{net.rates or ''}")
        self._groups = self._connect(shape)
        self._queues: list[queue.SimpleQueue[_ReduceJob | None]] = [queue.SimpleQueue() for _ in shape.processes]
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"collective-{number}", daemon=True)
            for number in range(len(shape.processes))
        ]
        self._watcher = threading.Thread(target=self._watch, name="collective-watch", daemon=True)
        for thread in (*self._threads, self._watcher):
            thread.start()
        atexit.register(self.close)  # a thread that is inside torch when Python ends crashes the process

    # Use

    def start(self, flat: torch.Tensor, divide: float = 1.0) -> torch.futures.Future[torch.Tensor]:
        """Begin to add up a contiguous tensor in place. Each rank's values are first divided by `divide`.

        Return a future of the sum. It has a CollectiveError if a rank fails.
        """
        if not flat.is_contiguous() or flat.requires_grad:
            raise CollectiveError(
                "The tensor must be contiguous and must not require a gradient; detach and copy it first."
            )
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        host = flat.view(-1).cpu()
        if divide != 1.0:  # divided before adding, as DDP does: a sum of half-precision numbers may overflow
            host /= divide
        job = _ReduceJob(flat, host, future, len(self._queues))
        with self._lock:
            refused = self._failed or ("This all-reduce is closed." if self._closed.is_set() else "")
            if not refused:
                self._pending.add(future)
                for waiting in self._queues:  # in the same order for all processes of the schedule
                    waiting.put(job)
        if refused:
            _fail_future(future, refused)
        return future

    def __call__(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all ranks, in place."""
        return self.start(flat).wait()

    def close(self) -> None:
        """End the threads. Tensors under way get a short time to complete."""
        atexit.unregister(self.close)
        with self._lock:
            self._closed.set()
            for waiting in self._queues:
                waiting.put(None)
        for thread in (*self._threads, self._watcher):
            if thread is not threading.current_thread():
                thread.join(2 * CHECK_SECONDS)

    # Steps

    def _plan(self, elements: int) -> list[list[_RankStep]]:
        """Return the part of this rank in each process, for tensors of this size."""
        if elements not in self._plans:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[elements] = [self._part(process) for process in self._schedule(elements).processes]
        return self._plans[elements]

    def _part(self, process: ScheduleProcess) -> list[_RankStep]:
        steps = [_RankStep(step.adds, *step.of(self._rank)) for step in process.steps]
        return [step for step in steps if step.sends or step.receives]

    def _work(self, number: int) -> None:
        waiting = self._queues[number]
        while (job := waiting.get()) is not None and not self._failed:
            try:
                for step in self._plan(job.host.numel())[number]:
                    self._run_step(number, step, job.host)
                job.done(self._claim)
            except Exception as error:
                self._fail(str(error))
                return

    def _run_step(self, number: int, step: _RankStep, flat: torch.Tensor) -> None:
        works, beside = [], []
        for each in step.receives:
            target = flat[each.start : each.stop]
            room = torch.empty_like(target) if step.adds else target
            if step.adds:
                beside.append((target, room))
            group, place = self._group_and_place(number, each)
            with self._peer_errors("receive from", each.other):
                works.append((group.recv([room], place, 0), "receive from", each.other))
        for each in step.sends:
            group, place = self._group_and_place(number, each)
            with self._peer_errors("send to", each.other):
                works.append((group.send([flat[each.start : each.stop]], place, 0), "send to", each.other))
        for work, action, other in works:
            with self._peer_errors(action, other):
                work.wait()
        for target, room in beside:
            target += room

    @contextlib.contextmanager
    def _peer_errors(self, action: str, other: int) -> Iterator[None]:
        """Say which rank an error of gloo is about. A transfer may fail when it is begun or while it is awaited."""
        try:
            yield
        except RuntimeError as error:
            raise CollectiveError(
                f"Rank {self._rank} could not {action} rank {other}, which has died or does not answer; start the "
                f"job again, from a checkpoint if there is one ({_reason(error)})."
            ) from None

    def _group_and_place(self, number: int, transfer: Transfer) -> tuple[Any, int]:
        group = self._groups[number, transfer.level]
        if transfer.level == ANY:
            return group, transfer.other
        return group, self._net.digit(transfer.other, transfer.level)

    def _claim(self, future: torch.futures.Future[torch.Tensor]) -> bool:
        """Return True once for each future: for the thread that may set its result."""
        with self._lock:
            if future not in self._pending:
                return False
            self._pending.remove(future)
            return True

    # Failures

    def _fail(self, reason: str) -> None:
        """Fail all tensors under way, and all that are started later. Let the other ranks know."""
        with self._lock:
            first, self._failed = not self._failed, self._failed or reason
        if not first:
            return
        # The rank that hosts the store may be the one that failed. Then the store does not answer.
        announcing = threading.Thread(target=self._announce_failure, daemon=True)
        announcing.start()
        announcing.join(CHECK_SECONDS)
        self._release_peers()
        with self._lock:
            pending, self._pending = self._pending, set()
        for future in pending:
            _fail_future(future, self._failed)

    def _announce_failure(self) -> None:
        """Write the reason of the failure to the store.

        If another rank was first, take its reason instead: it knows best what happened.
        """
        with contextlib.suppress(RuntimeError):  # the store may be gone
            store = _own_connection(self._store)
            if store.check([FAILED_KEY]):
                self._failed = store.get(FAILED_KEY).decode()
            else:
                store.set(FAILED_KEY, self._failed)

    def _release_peers(self) -> None:
        """Close the connections to all peers, so that neither they nor the threads of this rank wait any longer.

        gloo has no call for that, but it closes a connection when a receive on it times out.
        """
        for (_, level), group in self._groups.items():
            mine = self._rank if level == ANY else self._net.digit(self._rank, level)
            for place in range(group.size()):
                if place != mine:
                    with contextlib.suppress(RuntimeError):
                        group.recv([torch.empty(1)], place, UNUSED_TAG).wait(timedelta(milliseconds=1))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CHECK_SECONDS)

    def _watch(self) -> None:
        """Fail when the store says that another rank has failed.

        A rank notices the failure of its peers alone. It may wait for a peer that waits for the rank that failed.
        """
        store = _own_connection(self._store)
        with contextlib.suppress(RuntimeError):  # the rank that hosts the store has ended; its peers notice if it died
            while not self._closed.wait(CHECK_SECONDS) and not self._failed:
                if store.check([FAILED_KEY]):
                    self._fail(store.get(FAILED_KEY).decode())

    # Groups

    def _agree(self, collective: str) -> None:
        """Raise CollectiveError on all ranks if one of them lacks a NIC or runs another collective.

        This happens before the ranks wait for one another.
        """
        text = collective
        try:
            for nic in self._nics.values():
                _device(distributed.ProcessGroupGloo, nic)
        except CollectiveError as error:
            text = f"{ERROR_MARK}{error}"
        for rank, other in enumerate(self._exchange("here", text)):
            if other != collective:
                raise CollectiveError(
                    f"Rank {rank} runs {other}, but rank {self._rank} runs {collective}; all must run the same."
                )

    def _exchange(self, topic: str, text: str) -> list[str]:
        """Send a text to all ranks, and return the texts of all. If a rank has sent an error, raise it."""
        keys = [f"{topic}/{rank}" for rank in range(self._net.servers)]
        self._store.set(keys[self._rank], text)
        try:
            self._store.wait(keys, timedelta(seconds=min(self._timeout, TIMEOUT)))
        except RuntimeError as error:
            raise CollectiveError(f"Not all {self._net.servers} ranks have connected: {_reason(error)}.") from None
        texts = [self._store.get(key).decode() for key in keys]
        for rank, each in enumerate(texts):
            if each.startswith(ERROR_MARK):
                raise CollectiveError(f"Rank {rank}: {each.removeprefix(ERROR_MARK)}")
        return texts

    def _connect(self, shape: Schedule) -> dict[tuple[int, int], Any]:
        """Make the groups of this rank, and wait until every rank has made its own.

        A rank may have nothing to add up and close at once. That must not cut a connection that a peer is still making.
        """
        try:
            made = self._make_groups(shape)
        except CollectiveError as error:
            self._store.set(f"connected/{self._rank}", f"{ERROR_MARK}{error}")
            raise
        self._exchange("connected", "")
        return made

    def _make_groups(self, shape: Schedule) -> dict[tuple[int, int], Any]:
        """Return the groups by process and level. Every rank makes them in the same order."""
        made = {}
        for number, process in enumerate(shape.processes):
            levels = sorted({int(level) for step in process.steps for level in step.level})
            for level in levels:
                made[number, level] = self._group(number, level, process.direction)
        return made

    def _group(self, number: int, level: int, direction: int) -> Any:
        if level == ANY:
            place, members, name = self._rank, self._net.servers, "all"
        else:
            place, members = self._net.digit(self._rank, level), self._net.sizes[level]
            name = str(self._net.peer(self._rank, level, 0))
        store = PrefixStore(f"{number}/{level}/{name}", self._store)
        nic = self._nics.get(0 if level == ANY else self._net.port(level, direction), "")
        try:
            return gloo(store, place, members, self._timeout, nic)
        except RuntimeError as error:
            raise CollectiveError(f"Rank {self._rank} could not connect to its peers: {_reason(error)}.") from None


def _own_connection(store: Any) -> Any:
    """Return a second connection to a store, since a wait on one connection blocks its other users.

    A store without connections, such as a file, cannot be cloned, and is returned as it is.
    """
    try:
        return store.clone()
    except (RuntimeError, AttributeError):
        return store


def _fail_future(future: torch.futures.Future[torch.Tensor], reason: str) -> None:
    future.set_exception(CollectiveError(reason))  # type: ignore[arg-type]


def _reason(error: Exception) -> str:
    """Return the message of an error of gloo, without the place in its source."""
    return re.sub(r"^\[[^\]]*\] *", "", str(error).strip().splitlines()[0]).rstrip(".")


def gloo(store: Any, rank: int, ranks: int, timeout: float, nic: str = "") -> Any:
    """Return a gloo group over a NIC: an interface or an address of this machine. Without one, gloo chooses."""
    kind: Any = distributed.ProcessGroupGloo
    options = kind._Options()
    options._timeout, options._threads = timedelta(seconds=timeout), 1
    options._devices = [_device(kind, nic)]
    return kind(store, rank, ranks, options)


@cache  # each device has a thread for its sockets
def _device(kind: Any, nic: str) -> Any:
    if not nic:
        return kind.create_default_device()
    names = [name for _, name in socket.if_nameindex()]
    try:
        if nic in names:
            return kind.create_device(interface=nic)
        socket.inet_aton(nic)
        return kind.create_device(hostname=nic)
    except (OSError, RuntimeError):
        raise CollectiveError(f"There is no NIC {nic!r} here; there are {', '.join(names)}.") from None


class _ReduceJob:
    """A tensor that the processes of the schedule are adding up."""

    def __init__(
        self,
        flat: torch.Tensor,
        host: torch.Tensor,
        future: torch.futures.Future[torch.Tensor],
        processes: int,
    ) -> None:
        self.flat, self.host, self._future, self._left = flat, host, future, processes
        self._lock = threading.Lock()

    def done(self, claim: Callable[[torch.futures.Future[torch.Tensor]], bool]) -> None:
        """Note that one process is done with the tensor. The last one sets the result."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        if self.flat.is_cuda:
            self.flat.copy_(self.host.view_as(self.flat))
        if claim(self._future):
            self._future.set_result(self.flat)
