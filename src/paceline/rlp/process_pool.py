"""Processes that play episodes in parallel."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import torch

from paceline.workloads.data import Data

_tables: dict[str, Data] = {}  # in a process of the pool: the datasets, by name


@contextmanager
def pool_of(jobs: int, tables: Mapping[str, Data]) -> Iterator[ProcessPoolExecutor | None]:
    """Start `jobs` processes that hold these datasets, or none for a single job. An error terminates them."""
    if jobs < 2:
        yield None
        return
    # The processes allocate and free the same large blocks of memory all the time. By default, glibc returns them to
    # the system each time, which takes a third of the run time.
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        os.environ.setdefault(name, str(2**32))
    context = multiprocessing.get_context("spawn")  # a forked process would inherit the locks of threads
    with ProcessPoolExecutor(jobs, context, _initialize, (dict(tables),)) as pool:
        try:
            yield pool
        except BaseException:
            for process in list(pool._processes.values()):
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def table(name: str) -> Data:
    """Return a dataset, in a process of the pool."""
    return _tables[name]


def _initialize(tables: dict[str, Data]) -> None:
    _tables.update(tables)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which terminates the pool
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
