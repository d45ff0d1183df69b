"""Processes that play side by side."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import torch

from paceline.workloads.data import Data

_tables: dict[str, Data] = {}  # in a process that plays: the data, by name


@contextmanager
def pool_of(jobs: int, tables: Mapping[str, Data]) -> Iterator[ProcessPoolExecutor | None]:
    """So many processes, each with these data; none where one job is enough. Whatever goes wrong ends them."""
    if jobs < 2:
        yield None
        return
    # A process that plays takes and gives back the same large pieces of memory all the time. glibc would return them
    # to the system each time, which takes a third of the time.
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        os.environ.setdefault(name, str(2**32))
    context = multiprocessing.get_context("spawn")  # a fork would inherit threads' locks
    with ProcessPoolExecutor(jobs, context, _ready, (dict(tables),)) as pool:
        try:
            yield pool
        except BaseException:
            for process in list(pool._processes.values()):
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def table(name: str) -> Data:
    """The data, in a process of the pool."""
    return _tables[name]


def _ready(tables: dict[str, Data]) -> None:
    _tables.update(tables)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that it plays for
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
