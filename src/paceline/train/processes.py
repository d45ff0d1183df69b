"""The place of one process among all processes of a job."""

from __future__ import annotations

import os

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.serve.environment import CONNECT, LAUNCHED, RANK, RANKS, RUN, WORKERS, is_launched, worker_number
from paceline.serve.worker import uncaught
from paceline.train.backend import Backend

REDUCED_TWICE = (
    "The model is wrapped in DistributedDataParallel, which reduces gradients a second time; join the job with the "
    "model itself, before you wrap it or in place of that."
)
SEVERAL_RANKS = (
    "A Trainer is a worker of one process; leave out --ranks-per-worker, and start one worker for each GPU: "
    "`paceline run --workers {}`."
)
AGAIN = "This worker has trained its model in the job; a job trains one model once: start another job for the next."
NESTED = (
    "Another launcher has started {} processes inside this worker, and a worker of this job is one process; start the "
    "script itself: `paceline run --workers {} SCRIPT`, without `torchrun` or `accelerate launch --num_processes {}`."
)


def check_process(model: torch.nn.Module) -> None:
    """Raise ValueError if torch.distributed would connect the processes of the job too."""
    if isinstance(model, DistributedDataParallel):
        raise ValueError(REDUCED_TWICE)
    processes = _number("WORLD_SIZE", 1)
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get(LAUNCHED) == RUN and processes > ranks_of_worker():
        raise ValueError(NESTED.format(processes, processes, processes))


def ranks_of_worker() -> int:
    """Return the number of processes of this worker."""
    return _number(RANKS, 1)


def check_one_rank() -> None:
    """Raise ValueError if this worker has several processes: the loop of a library would run in each of them."""
    ranks = ranks_of_worker()
    if ranks > 1:
        raise ValueError(SEVERAL_RANKS.format(ranks))


def will_join() -> bool:
    """Return whether this process is to join a job. If so, uncaught errors of paceline are sentences from now on."""
    joins = bool(os.environ.get(CONNECT))
    if joins or is_launched():
        uncaught.shorten()
    return joins


def expected_rank() -> int:
    """Return the rank that this process will have in the job, as far as its environment tells; 0 if it does not."""
    return (worker_number() or 0) * _number(RANKS, 1) + _number(RANK, 0)


def expected_world_size() -> int:
    """Return the number of processes that the job starts with, as far as the environment tells; 1 if it does not."""
    return _number(WORKERS, 1) * _number(RANKS, 1)


def _number(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else otherwise


class JobProcess:
    """Base of the objects that stand for one process of a job: a session and its optimizer.

    A job that starts with N workers of R ranks each has N·R processes. These figures do not change when workers leave
    or join. So a worker that joins in addition to the first N has a rank of `world_size` or more.
    """

    _backend: Backend

    @property
    def world_size(self) -> int:
        """The number of processes that the job starts with: workers × ranks. It is 1 under plain `python`."""
        self._backend.knows_its_part = True
        return self._backend.workers * self._backend.ranks

    @property
    def rank(self) -> int:
        """The number of this process in the job: worker · ranks + the rank within the worker; 0 when it trains alone.

        It is below `world_size`, unless more workers have joined than the job started with.
        """
        self._backend.knows_its_part = True
        return self._backend.worker * self._backend.ranks + self._backend.rank

    @property
    def worker(self) -> int:
        """The number of this worker; 0 when it trains alone."""
        return self._backend.worker

    @property
    def is_main(self) -> bool:
        """Whether this is the one process of the job that should print, evaluate and save.

        It is True in rank 0 of worker 0, and under plain `python`.
        """
        return self._backend.worker == self._backend.rank == 0
