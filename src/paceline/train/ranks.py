"""Several processes of one host as one worker: they add up their gradients among themselves, and push once.

The first of them (rank 0) alone talks to the server. What it is given to train on it tells the others through a store,
each takes its part of it, and what it pulls it sends to all. Groups and store are our own, so a script may still call
`torch.distributed.init_process_group` for itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, Store

from paceline.collectives.named import named
from paceline.collectives.reduce import AllReduce
from paceline.serve.environment import RANK, RANKS, REDUCE
from paceline.serve.worker.client import Client
from paceline.train.backend import AllAtOnce, AssignedSamples, ComputedGradient, Source, exchange
from paceline.train.flat_model import FlatModel

BACKEND = "PACELINE_RANKS_BACKEND"
PATIENCE = timedelta(days=7)  # a Grant may be long in coming, and a rank that dies is noticed without a timeout
KEPT = 1024  # messages in the store that a rank may be behind


def from_environment() -> tuple[int, int]:
    """Which rank of how many this process is."""
    try:
        rank, ranks = int(os.environ.get(RANK, "0")), int(os.environ.get(RANKS, "1"))
    except ValueError:
        rank, ranks = -1, 0
    if not 0 <= rank < ranks:
        raise ValueError(f"{RANK} must be a number from 0 up to {RANKS}; `paceline run --ranks-per-worker` sets both.")
    return rank, ranks


class RankGroup:
    """The ranks of this worker."""

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        self.rank, self.ranks = rank, ranks
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
        if not host or not port.isdigit():
            raise ValueError(f"With {RANKS} above 1, MASTER_ADDR and MASTER_PORT must say where the ranks meet.")
        # Multi-tenant: a process group of the script's own may use the same port.
        server: Store = distributed.TCPStore(  # type: ignore[attr-defined]
            host, int(port), is_master=rank == 0, timeout=PATIENCE, multi_tenant=True
        )
        self._store = PrefixStore("paceline", server)
        self._words: Any = distributed.ProcessGroupGloo(self._part("words"), rank, ranks, PATIENCE)
        self._bulk: Any = self._words
        if device.type == "cuda":
            self._bulk = self._for_cuda(device)
        self._told = 0
        self._reduce = self._collective(os.environ.get(REDUCE, ""))

    def _collective(self, text: str) -> AllReduce | None:
        """Another way to add up than the backend's own."""
        if not text:
            return None
        chosen = named(text)
        chosen.fits(self.ranks)
        nics = dict(enumerate(chosen.nics))
        stages, patience = chosen.stages, PATIENCE.total_seconds()
        return AllReduce(
            chosen.net, self.rank, self._part("reduce"), chosen.algorithm, stages, timeout=patience, nics=nics
        )

    def _part(self, name: str) -> Any:
        return PrefixStore(name, self._store)

    def _for_cuda(self, device: torch.device) -> Any:
        """NCCL where each rank has a GPU of its own; gloo otherwise, which goes through the host's memory."""
        fitting = distributed.is_nccl_available() and torch.cuda.device_count() >= self.ranks
        chosen = os.environ.get(BACKEND, "nccl" if fitting else "gloo")
        if chosen != "nccl":
            return distributed.ProcessGroupGloo(self._part("bulk"), self.rank, self.ranks, PATIENCE)
        torch.cuda.set_device(device)
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = PATIENCE
        return distributed.ProcessGroupNCCL(self._part("bulk"), self.rank, self.ranks, options)

    def add_words(self, values: list[float]) -> list[float]:
        """Sums over all ranks of a few numbers."""
        tensor = torch.tensor(values, dtype=torch.float64)
        with _together():
            self._words.allreduce([tensor]).wait()
        return tensor.tolist()

    def hear_words(self, values: list[int]) -> list[int]:
        """What rank 0 has to say."""
        tensor = torch.tensor(values, dtype=torch.int64)
        with _together():
            self._words.broadcast(tensor, 0).wait()
        return tensor.tolist()

    def add(self, flat: torch.Tensor) -> None:
        """The sum over all ranks, in place."""
        with _together():
            if self._reduce:
                self._reduce(flat)
            else:
                self._bulk.allreduce([flat]).wait()

    def spread(self, flat: torch.Tensor) -> None:
        """Rank 0's on all."""
        with _together():
            (self._words if flat.device.type == "cpu" else self._bulk).broadcast(flat, 0).wait()

    def say(self, words: str) -> None:
        """Rank 0 tells the others, who may listen later."""
        self._store.set(f"said/{self._told}", words)
        self._store.delete_key(f"said/{self._told - KEPT}")
        self._told += 1

    def listen(self) -> str:
        """What rank 0 said next."""
        with _together():
            self._store.wait([f"said/{self._told}"], PATIENCE)
            words = self._store.get(f"said/{self._told}").decode()
        self._told += 1
        return words


class RankedBackend(AllAtOnce):
    """One rank of a worker."""

    alone = False

    def __init__(self, connect: Callable[[], Client], flat: FlatModel, rank: int, ranks: int) -> None:
        """connect: joins the job; called in rank 0 alone."""
        self._flat, self.rank, self.ranks = flat, rank, ranks
        self._group = RankGroup(rank, ranks, flat.device)
        self._sum = torch.empty(flat.layout.size, device=flat.device)
        self._client: Client | None = None
        self.worker = self.joins = 0

        def begin() -> None:
            self._client = connect()
            if self._client.mixes:
                raise ValueError("A policy that mixes models cannot have workers of several ranks; use one rank.")
            self._client.begin(flat.weights_bytes())

        self._go_on(begin)

    def source(self) -> Source:
        def take(batch_size: int, size: int, epochs: int) -> AssignedSamples | None:
            if self._client is None:
                number, joins, epoch, start, stop = map(int, self._group.listen().split())
            else:
                count = self._client.granted.batch_size or batch_size * self.ranks
                given = self._client.take(count, size, epochs)
                number, joins, epoch, start, stop = (
                    given.number,
                    self._client.joins,
                    given.epoch,
                    given.start,
                    given.stop,
                )
                self._group.say(f"{number} {joins} {epoch} {start} {stop}")
            if joins != self.joins:  # The worker was given up, and rank 0 has the newest weights of its new life.
                self.joins = joins
                self._spread()
            return _part(AssignedSamples(number, joins, epoch, start, stop, stop - start), self.rank, self.ranks)

        return take

    def exchange(self, computed: ComputedGradient) -> bool:
        """Add up with the other ranks, by batch size; rank 0 exchanges the sum with the server."""
        size = computed.batch_size
        has_loss = 0.0 if computed.loss is None else float(size)
        words = [float(computed.overflowed), size, has_loss, (computed.loss or 0.0) * size]
        overflowed, total, of_loss, loss = self._group.add_words(words)
        if overflowed:
            return False  # on all alike
        self._flat.add_up(self._sum)
        gradients, statistics = self._flat.split(self._sum)
        gradients.mul_(size / total / computed.scale)
        statistics.mul_(size / total)
        self._group.add(self._sum)
        client = self._client

        def push() -> None:
            assert client is not None
            self._flat.take_over(self._sum)
            told = replace(computed, batch_size=int(total), loss=loss / of_loss if of_loss else None)
            exchange(client, self._flat, told, self._since)

        self._go_on(push)
        return True

    def _go_on(self, ask: Callable[[], None]) -> None:
        """Rank 0 asks the server; then all have its weights."""
        error: BaseException | None = None
        values = [0, 0, 0]
        if self.rank == 0:
            try:
                ask()
                assert self._client is not None
                values = [1, self._client.worker, self._client.joins]
            except BaseException as problem:
                error = problem
        good, self.worker, self.joins = self._group.hear_words(values)
        if error is not None:
            raise error
        if not good:
            raise ConnectionError("Rank 0 of this worker could not go on; its output says why.")
        self._spread()
        self._since = time.perf_counter()

    def _spread(self) -> None:
        """Bring rank 0's weights into all ranks' models."""
        if self._flat.device.type == "cpu":
            self._group.spread(self._flat.weights)
        else:  # over the links between GPUs, and then down
            if self.rank == 0:
                self._sum.copy_(self._flat.weights, non_blocking=True)
            self._group.spread(self._sum)
            if self.rank != 0:
                self._flat.weights.copy_(self._sum)
        self._flat.scatter()

    @property
    def mixes(self) -> bool:
        return False  # refused at the start

    def finish(self) -> None:
        """All ranks have the last model."""

        def last() -> None:
            assert self._client is not None
            while not self._client.finish(self._flat.weights_bytes()):
                pass  # as in `Link.finish`

        self._go_on(last)

    def measured(self, kind: str, value: float) -> None:
        if self._client is not None:
            self._client.measured(kind, value)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def _part(whole: AssignedSamples, rank: int, ranks: int) -> AssignedSamples | None:
    """A rank's samples of those that all ranks are to train on. Where there is none for it, one that does not count."""
    count = whole.stop - whole.start
    if not count:
        return None
    start, stop = whole.start + count * rank // ranks, whole.start + count * (rank + 1) // ranks
    if start == stop:
        return replace(whole, stop=whole.start + 1, size=0)
    return replace(whole, start=start, stop=stop, size=stop - start)


@contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"Another rank of this worker is gone: {error}") from None
