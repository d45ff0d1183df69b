"""Several processes of one host as one worker: the ranks sum their gradients and push once.

Only rank 0 talks to the server. It announces the assigned samples to the other ranks through a store, and each rank
trains on its part of them. After a pull, rank 0 broadcasts the weights. The process groups and the store are separate
from torch's default group, so a script can still call `torch.distributed.init_process_group`.
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
from paceline.serve.worker.departure import Departed, Departure
from paceline.train.backend import AssignedSamples, ComputedGradient, PushAfterBackward, SampleSource, exchange
from paceline.train.flat_model import FlatModel
from paceline.train.loading import Loading

BACKEND = "PACELINE_RANKS_BACKEND"
TIMEOUT = timedelta(days=7)  # a Grant may take long, and a rank that dies is noticed without a timeout
MAX_LAG = 1024  # announcements in the store by which a rank may be behind rank 0


def from_environment() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks of its worker."""
    try:
        rank, ranks = int(os.environ.get(RANK, "0")), int(os.environ.get(RANKS, "1"))
    except ValueError:
        rank, ranks = -1, 0
    if not 0 <= rank < ranks:
        raise ValueError(f"{RANK} must be at least 0 and below {RANKS}; `paceline run --ranks-per-worker` sets both.")
    return rank, ranks


class RankGroup:
    """The connections between the ranks of one worker."""

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        """device: the device of the tensors that are summed and broadcast."""
        self.rank, self.ranks = rank, ranks
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
        if not host or not port.isdigit():
            raise ValueError(f"With {RANKS} above 1, MASTER_ADDR and MASTER_PORT must hold the address of rank 0.")
        # Multi-tenant, because a process group that the script creates may use the same port.
        server: Store = distributed.TCPStore(  # type: ignore[attr-defined]
            host, int(port), is_master=rank == 0, timeout=TIMEOUT, multi_tenant=True
        )
        self._store = PrefixStore("paceline", server)
        self._cpu_group: Any = distributed.ProcessGroupGloo(self._substore("words"), rank, ranks, TIMEOUT)
        self._tensor_group: Any = self._cpu_group
        if device.type == "cuda":
            self._tensor_group = self._cuda_group(device)
        self._announced = 0  # announcements that this rank has sent or received
        self._reduce = self._all_reduce(os.environ.get(REDUCE, ""))

    def _all_reduce(self, text: str) -> AllReduce | None:
        """Return the all-reduce that this text names, or None for that of the process group."""
        if not text:
            return None
        chosen = named(text)
        chosen.fits(self.ranks)
        nics = dict(enumerate(chosen.nics))
        return AllReduce(
            chosen.net,
            self.rank,
            self._substore("reduce"),
            chosen.algorithm,
            chosen.stages,
            timeout=TIMEOUT.total_seconds(),
            nics=nics,
        )

    def _substore(self, name: str) -> Any:
        return PrefixStore(name, self._store)

    def _cuda_group(self, device: torch.device) -> Any:
        """Return an NCCL group if every rank has its own GPU, else a gloo group, which copies through the host."""
        fitting = distributed.is_nccl_available() and torch.cuda.device_count() >= self.ranks
        chosen = os.environ.get(BACKEND, "nccl" if fitting else "gloo")
        if chosen != "nccl":
            return distributed.ProcessGroupGloo(self._substore("bulk"), self.rank, self.ranks, TIMEOUT)
        torch.cuda.set_device(device)
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        return distributed.ProcessGroupNCCL(self._substore("bulk"), self.rank, self.ranks, options)

    def sum_numbers(self, values: list[float]) -> list[float]:
        """Return the sums of a few numbers over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        with _rank_errors():
            self._cpu_group.allreduce([tensor]).wait()
        return tensor.tolist()

    def broadcast_numbers(self, values: list[int]) -> list[int]:
        """Return rank 0's values in all ranks."""
        tensor = torch.tensor(values, dtype=torch.int64)
        with _rank_errors():
            self._cpu_group.broadcast(tensor, 0).wait()
        return tensor.tolist()

    def sum(self, flat: torch.Tensor) -> None:
        """Replace the tensor by its sum over all ranks."""
        with _rank_errors():
            if self._reduce:
                self._reduce(flat)
            else:
                self._tensor_group.allreduce([flat]).wait()

    def broadcast(self, flat: torch.Tensor) -> None:
        """Replace the tensor by that of rank 0."""
        with _rank_errors():
            (self._cpu_group if flat.device.type == "cpu" else self._tensor_group).broadcast(flat, 0).wait()

    def announce(self, text: str) -> None:
        """Send a text from rank 0 to the others, which may receive it later."""
        self._store.set(f"said/{self._announced}", text)
        self._store.delete_key(f"said/{self._announced - MAX_LAG}")
        self._announced += 1

    def receive(self) -> str:
        """Wait for the next text that rank 0 announces, and return it."""
        with _rank_errors():
            self._store.wait([f"said/{self._announced}"], TIMEOUT)
            text = self._store.get(f"said/{self._announced}").decode()
        self._announced += 1
        return text


class RankedBackend(PushAfterBackward):
    """One rank of a worker that consists of several processes."""

    alone = False

    def __init__(
        self, connect: Callable[[Departure], Client], flat: FlatModel, loading: Loading, rank: int, ranks: int
    ) -> None:
        """connect: joins the job. It is called in rank 0 only."""
        self._flat, self._loading, self.rank, self.ranks = flat, loading, rank, ranks
        self._group = RankGroup(rank, ranks, flat.device)
        self._sum = torch.empty(flat.layout.size, device=flat.device)
        self._client: Client | None = None
        self.worker = self.joins = self._granted = 0
        self.workers, self.has_trained = 1, False

        def begin() -> None:
            self._client = connect(Departure())
            if self._client.mixes:
                raise ValueError(
                    "A policy that mixes models cannot have workers of several ranks; use --ranks-per-worker 1."
                )
            loading.begin(self._client)

        self._in_rank_0(begin)
        client = self._client
        (has_trained,) = self._group.broadcast_numbers([int(client is not None and client.version > 0)])
        self.has_trained = bool(has_trained)
        self._departure = Departure.at_sigterm()

    def sample_source(self) -> SampleSource:
        def take(batch_size: int, size: int, epochs: int, planned: int | None) -> AssignedSamples | None:
            if self._client is None:
                number, joins, epoch, start, stop = map(int, self._group.receive().split())
            else:
                count = self._client.granted.batch_size or batch_size * self.ranks
                samples = self._client.take(count, size, epochs, planned)
                number, joins = samples.number, self._client.joins
                epoch, start, stop = samples.epoch, samples.start, samples.stop
                self._group.announce(f"{number} {joins} {epoch} {start} {stop}")
            if joins != self.joins:  # the worker was given up, and rank 0 joined again and pulled the newest weights
                self.joins = joins
                self._broadcast_weights()
            return _part(AssignedSamples(number, joins, epoch, start, stop, stop - start), self.rank, self.ranks)

        return take

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        return self._group.sum_numbers(values)

    def end_samples(self, size: int) -> None:
        if self._client is not None:
            self._client.end_samples(size)

    def exchange(self, computed: ComputedGradient) -> bool:
        """Average the gradients over the ranks, weighted by batch size. Rank 0 exchanges the mean with the server."""
        size = computed.batch_size
        size_with_loss = 0.0 if computed.loss is None else float(size)
        numbers = [float(computed.overflowed), size, size_with_loss, (computed.loss or 0.0) * size]
        overflowed, total, total_with_loss, loss, loaded, asked = self._group.sum_numbers(
            [*numbers, float(self._loading.found()), float(self._departure.asked)]
        )
        if overflowed:
            return False  # in all ranks, because each has the same sum
        if loaded and (not self._offer_weights() or computed.taken):
            return False
        self._flat.gather_into(self._sum)
        gradients, statistics = self._flat.split(self._sum)
        gradients.mul_(size / total / computed.scale)
        statistics.mul_(size / total)
        self._group.sum(self._sum)
        client = self._client

        def push() -> None:
            assert client is not None
            self._flat.set_gradient(self._sum)
            mean_loss = loss / total_with_loss if total_with_loss else None
            exchange(client, self._flat, replace(computed, batch_size=int(total), loss=mean_loss), self._pulled_at)

        self._in_rank_0(push)
        if asked:  # one rank or more: all of them leave together
            if client is not None:
                client.departure.asked = True
            raise Departed
        self._loading.has_stepped = True
        return True

    def _offer_weights(self) -> bool:
        """Offer weights that were loaded into rank 0 to the job. Return whether the parameters of all ranks stay."""
        before = self._loading.parameters_now()

        def offer() -> None:
            assert self._client is not None
            self._loading.offer(self._client)

        self._in_rank_0(offer)
        (others,) = self._group.sum_numbers([float(not self._loading.is_followed(before))])
        return not others

    def _in_rank_0(self, action: Callable[[], None]) -> None:
        """Call the function in rank 0, and then give all ranks the weights that it pulled.

        If it fails, its error is raised in rank 0, and a ConnectionError in the others.
        """
        error: BaseException | None = None
        values = [0, 0, 0, 0, 0]
        if self.rank == 0:
            try:
                action()
                assert self._client is not None
                client = self._client
                values = [1, client.worker, client.joins, client.workers, client.granted.batch_size or 0]
            except BaseException as problem:
                error = problem
        succeeded, self.worker, self.joins, self.workers, self._granted = self._group.broadcast_numbers(values)
        if error is not None:
            raise error
        if not succeeded:
            raise ConnectionError("Rank 0 of this worker failed; see its output for the reason.")
        self._broadcast_weights()
        self._pulled_at = time.perf_counter()

    def _broadcast_weights(self) -> None:
        """Copy rank 0's weights to the models of all ranks."""
        if self._flat.device.type == "cpu":
            self._group.broadcast(self._flat.weights)
        else:  # over the links between the GPUs, and from there to the host
            if self.rank == 0:
                self._sum.copy_(self._flat.weights, non_blocking=True)
            self._group.broadcast(self._sum)
            if self.rank != 0:
                self._flat.weights.copy_(self._sum)
        self._flat.scatter()
        self._loading.pulled()

    @property
    def granted_batch(self) -> int | None:
        start, stop = _range_of(self._granted, self.rank, self.ranks)
        return max(1, stop - start) if self._granted else None

    @property
    def mixes(self) -> bool:
        return False  # such a policy was refused at the start

    @property
    def steps_here(self) -> bool:
        return False

    def load_weights(self) -> None:
        """Give the job the weights of rank 0. All ranks of the main worker must call this together."""
        if self.worker == 0:

            def load() -> None:
                assert self._client is not None
                self._loading.load_weights(self._client)

            self._in_rank_0(load)

    def load_optimizer_state(self) -> None:
        if self._client is not None:
            self._loading.load_state(is_main=self.worker == 0)

    def optimizer_state(self) -> dict[int, Any] | None:
        if self._client is None:
            return None
        return self._loading.packed(self._loading.pull_states(self._client))

    def finish(self) -> None:
        """Wait until the other workers are done too, and pull the final model into all ranks."""

        def pull_final_model() -> None:
            assert self._client is not None
            while not self._client.finish(self._flat.weights_bytes()):
                pass  # as in `JobBackend.finish`

        self._departure.release()  # ranks that wait cannot leave together
        self._in_rank_0(pull_final_model)

    def report_metric(self, name: str, value: float) -> None:
        if self._client is not None:
            self._client.measured(name, value)

    def close(self) -> None:
        self._departure.release()
        if self._client is not None:
            self._client.close()


def _part(whole: AssignedSamples, rank: int, ranks: int) -> AssignedSamples | None:
    """Return a rank's part of the samples that all ranks train on, or None if there are no samples.

    If there are fewer samples than ranks, a rank without one gets the first sample, which does not count.
    """
    count = whole.stop - whole.start
    if not count:
        return None
    start, stop = _range_of(count, rank, ranks)
    if start == stop:
        return replace(whole, stop=whole.start + 1, size=0)
    return replace(whole, start=whole.start + start, stop=whole.start + stop, size=stop - start)


def _range_of(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the part of a rank when so many samples are divided among all ranks."""
    return count * rank // ranks, count * (rank + 1) // ranks


@contextmanager
def _rank_errors() -> Iterator[None]:
    """Raise a ConnectionError if a collective fails because another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"Another rank of this worker is gone: {error}") from None
