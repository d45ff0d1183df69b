"""A schedule carried out for real, on torch.distributed, over gloo. What is on a GPU goes through the host's memory.

Every process of the schedule has a thread of its own, and with its peers at each level a group of its own: groups are
never shared, or messages of two processes would cross. Sends and receives of a step are under way together; what is to
be added is received beside it.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore

from paceline.collectives.algorithms import make
from paceline.collectives.schedule import ANY, Schedule, ScheduleProcess, Transfer
from paceline.collectives.topology import Topology

TIMEOUT = 300.0  # seconds for which a rank may keep the others waiting
LOOK = 0.5  # seconds between looks at whether somebody has failed
FAILED = "failed"
WRONG = "!"
FAREWELL = 1  # a tag that nothing is ever sent with
KEPT = 64  # plans, one for each number of elements that there was


class CollectiveError(RuntimeError):
    """The ranks cannot add up what they have. The message says why, and what to do."""


@dataclass(frozen=True)
class _Turn:
    """One rank's part in a step."""

    adds: bool
    sends: list[Transfer]
    receives: list[Transfer]


class AllReduce:
    """Sums over all ranks, as a schedule has it. All ranks make it, and use it in the same order."""

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
        """nics: of this machine, by the port in the topology: interfaces or addresses. Without, gloo chooses one.

        store: where the ranks meet, with keys of its own.
        """
        self._net, self._rank, self._store = net, rank, store
        self._schedule: Callable[[int], Schedule] = lambda elements: make(algorithm, net, elements, stages)
        self._timeout, self._nics = timeout, nics or {}
        self._plans: dict[int, list[list[_Turn]]] = {}
        self._failed = ""
        self._pending: set[torch.futures.Future[torch.Tensor]] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        if not 0 <= rank < net.servers:
            raise CollectiveError(f"{net.name} has {net.servers} servers; there is no rank {rank}.")
        shape = self._schedule(net.servers * net.servers * net.ports)  # every transfer has something to carry
        self._meet(f"{algorithm} ({'/'.join(stages)}) on {net.name}")
        self._groups = self._connected(shape)
        self._queues: list[queue.SimpleQueue[_ReduceJob | None]] = [queue.SimpleQueue() for _ in shape.processes]
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"collective-{number}", daemon=True)
            for number in range(len(shape.processes))
        ]
        self._watcher = threading.Thread(target=self._watch, name="collective-watch", daemon=True)
        for thread in (*self._threads, self._watcher):
            thread.start()
        atexit.register(self.close)  # a thread that is in torch when Python ends takes the process with it

    # What one does with it

    def start(self, flat: torch.Tensor, divide: float = 1.0) -> torch.futures.Future[torch.Tensor]:
        """Begin to add up a contiguous tensor, in place, each rank's divided by that number first."""
        if not flat.is_contiguous() or flat.requires_grad:
            raise CollectiveError(
                "What is added up must be contiguous, and need no gradient; detach and copy it first."
            )
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        host = flat.view(-1).cpu()
        if divide != 1.0:  # before, as DDP does: a sum of half-precision numbers may be too large
            host /= divide
        job = _ReduceJob(flat, host, future, len(self._queues))
        with self._lock:
            refused = self._failed or ("It is closed." if self._closed.is_set() else "")
            if not refused:
                self._pending.add(future)
                for waiting in self._queues:  # in the same order for all processes
                    waiting.put(job)
        if refused:
            _refuse(future, refused)
        return future

    def __call__(self, flat: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        return self.start(flat).wait()

    def close(self) -> None:
        """It is not used any more. What is under way is waited for, but not for long."""
        atexit.unregister(self.close)
        with self._lock:
            self._closed.set()
            for waiting in self._queues:
                waiting.put(None)
        for thread in (*self._threads, self._watcher):
            if thread is not threading.current_thread():
                thread.join(2 * LOOK)

    # How it is done

    def _plan(self, elements: int) -> list[list[_Turn]]:
        """This rank's part in each process."""
        if elements not in self._plans:
            if len(self._plans) >= KEPT:
                self._plans.clear()
            self._plans[elements] = [self._part(process) for process in self._schedule(elements).processes]
        return self._plans[elements]

    def _part(self, process: ScheduleProcess) -> list[_Turn]:
        turns = [_Turn(step.adds, *step.of(self._rank)) for step in process.steps]
        return [turn for turn in turns if turn.sends or turn.receives]

    def _work(self, number: int) -> None:
        waiting = self._queues[number]
        while (job := waiting.get()) is not None and not self._failed:
            try:
                for turn in self._plan(job.host.numel())[number]:
                    self._take(number, turn, job.host)
                job.done(self._settled)
            except Exception as error:
                self._fail(str(error))
                return

    def _take(self, number: int, turn: _Turn, flat: torch.Tensor) -> None:
        works, beside = [], []
        for each in turn.receives:
            target = flat[each.start : each.stop]
            room = torch.empty_like(target) if turn.adds else target
            if turn.adds:
                beside.append((target, room))
            group, place = self._to(number, each)
            works.append((group.recv([room], place, 0), "receive from", each.other))
        for each in turn.sends:
            group, place = self._to(number, each)
            works.append((group.send([flat[each.start : each.stop]], place, 0), "send to", each.other))
        for work, what, other in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise CollectiveError(
                    f"Rank {self._rank} could not {what} rank {other}, which has died or does not answer; start the "
                    f"job again, from a checkpoint if there is one ({_said(error)})."
                ) from None
        for target, room in beside:
            target += room

    def _to(self, number: int, transfer: Transfer) -> tuple[Any, int]:
        group = self._groups[number, transfer.level]
        if transfer.level == ANY:
            return group, transfer.other
        return group, self._net.digit(transfer.other, transfer.level)

    def _settled(self, future: torch.futures.Future[torch.Tensor]) -> bool:
        """May it be told how it ended? Once it may."""
        with self._lock:
            if future not in self._pending:
                return False
            self._pending.remove(future)
            return True

    # When somebody dies

    def _fail(self, said: str) -> None:
        """All that is under way, and all that is asked for later, fails; and the others hear of it."""
        with self._lock:
            first, self._failed = not self._failed, self._failed or said
        if not first:
            return
        # Where the store is may be what has failed, and then it does not answer.
        telling = threading.Thread(target=self._tell, daemon=True)
        telling.start()
        telling.join(LOOK)
        self._sever()
        with self._lock:
            pending, self._pending = self._pending, set()
        for future in pending:
            _refuse(future, self._failed)

    def _tell(self) -> None:
        """Whoever was the first knows best what has happened."""
        with contextlib.suppress(RuntimeError):  # it may be gone
            store = _own(self._store)
            if store.check([FAILED]):
                self._failed = store.get(FAILED).decode()
            else:
                store.set(FAILED, self._failed)

    def _sever(self) -> None:
        """Let go of all peers, so that neither they nor our own threads wait any longer. gloo has no word for that, but
        gives a connection up once it has waited in vain."""
        for (_, level), group in self._groups.items():
            mine = self._rank if level == ANY else self._net.digit(self._rank, level)
            for place in range(group.size()):
                if place != mine:
                    with contextlib.suppress(RuntimeError):
                        group.recv([torch.empty(1)], place, FAREWELL).wait(timedelta(milliseconds=1))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(LOOK)

    def _watch(self) -> None:
        """Who waits for one who waits for one who died does not see it. So whoever does tells the store."""
        store = _own(self._store)
        with contextlib.suppress(RuntimeError):  # the store is gone with its rank: if that died, its peers see it
            while not self._closed.wait(LOOK) and not self._failed:
                if store.check([FAILED]):
                    self._fail(store.get(FAILED).decode())

    # Groups

    def _meet(self, what: str) -> None:
        """Whatever is wrong with one rank is heard by all, before they wait for one another."""
        said = what
        try:
            for nic in self._nics.values():
                _device(distributed.ProcessGroupGloo, nic)
        except CollectiveError as error:
            said = f"{WRONG}{error}"
        for rank, heard in enumerate(self._told("here", said)):
            if heard != what:
                raise CollectiveError(f"Rank {rank} does {heard}, and rank {self._rank} {what}; all must do the same.")

    def _told(self, topic: str, said: str) -> list[str]:
        """Tell all ranks something, and wait until each has told its own. If one has told an error, it is raised."""
        keys = [f"{topic}/{rank}" for rank in range(self._net.servers)]
        self._store.set(keys[self._rank], said)
        try:
            self._store.wait(keys, timedelta(seconds=min(self._timeout, TIMEOUT)))
        except RuntimeError as error:
            raise CollectiveError(f"Not all {self._net.servers} ranks came: {_said(error)}.") from None
        heard = [self._store.get(key).decode() for key in keys]
        for rank, words in enumerate(heard):
            if words.startswith(WRONG):
                raise CollectiveError(f"Rank {rank}: {words.removeprefix(WRONG)}")
        return heard

    def _connected(self, shape: Schedule) -> dict[tuple[int, int], Any]:
        """Make this rank's groups, and wait until every rank has made its own.

        A rank may have nothing to add up and close at once. That must not cut a peer's connection in the making.
        """
        try:
            made = self._made(shape)
        except CollectiveError as error:
            self._store.set(f"connected/{self._rank}", f"{WRONG}{error}")
            raise
        self._told("connected", "")
        return made

    def _made(self, shape: Schedule) -> dict[tuple[int, int], Any]:
        """By process and level. Each rank makes them in the same order."""
        made = {}
        for number, process in enumerate(shape.processes):
            levels = sorted({int(level) for step in process.steps for level in step.level})
            for level in levels:
                made[number, level] = self._group(number, level, process.turn)
        return made

    def _group(self, number: int, level: int, turn: int) -> Any:
        if level == ANY:
            place, members, name = self._rank, self._net.servers, "all"
        else:
            place, members = self._net.digit(self._rank, level), self._net.sizes[level]
            name = str(self._net.peer(self._rank, level, 0))
        store = PrefixStore(f"{number}/{level}/{name}", self._store)
        nic = self._nics.get(0 if level == ANY else self._net.port(level, turn), "")
        try:
            return gloo(store, place, members, self._timeout, nic)
        except RuntimeError as error:
            raise CollectiveError(f"Rank {self._rank} could not meet its peers: {_said(error)}.") from None


def _own(store: Any) -> Any:
    """A connection of one's own, where a store has connections: who waits on one keeps others waiting."""
    try:
        return store.clone()
    except (RuntimeError, NotImplementedError, AttributeError):
        return store


def _refuse(future: torch.futures.Future[torch.Tensor], said: str) -> None:
    future.set_exception(CollectiveError(said))  # type: ignore[arg-type]


def _said(error: Exception) -> str:
    """What gloo says, without the place in its source."""
    return re.sub(r"^\[[^\]]*\] *", "", str(error).strip().splitlines()[0]).rstrip(".")


def gloo(store: Any, rank: int, ranks: int, timeout: float, nic: str = "") -> Any:
    """A group over that NIC: an interface or an address of this machine; without, over one that gloo chooses."""
    kind: Any = distributed.ProcessGroupGloo
    options = kind._Options()
    options._timeout, options._threads = timedelta(seconds=timeout), 1
    options._devices = [_device(kind, nic)]
    return kind(store, rank, ranks, options)


@cache  # each has a thread that looks after its sockets
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
    """A tensor on its way through all processes."""

    def __init__(
        self,
        flat: torch.Tensor,
        host: torch.Tensor,
        future: torch.futures.Future[torch.Tensor],
        processes: int,
    ) -> None:
        self.flat, self.host, self._future, self._left = flat, host, future, processes
        self._lock = threading.Lock()

    def done(self, settled: Callable[[torch.futures.Future[torch.Tensor]], bool]) -> None:
        """One process is through with it."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        if self.flat.is_cuda:
            self.flat.copy_(self.host.view_as(self.flat))
        if settled(self._future):
            self._future.set_result(self.flat)
