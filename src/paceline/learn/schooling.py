"""A whole course of learning: side by side in processes, kept as it goes on, told as it goes on."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from paceline.learn import checkpoint
from paceline.learn.learner import Learner, Progressed, Settings, ready
from paceline.workloads.data import Data


def learned(
    settings: Settings,
    data: Data,
    episodes: int,
    kept: Path,
    resume: bool = False,
    device: str = "cpu",
    jobs: int = 1,
    told: Callable[[Progressed], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Learner, list[Progressed]]:
    """Learn from so many episodes, in whole iterations. After each, all is kept in a file.

    resume: go on from that file, with its settings. jobs: processes that play side by side.
    """
    with _pool(data, jobs) as pool:
        if resume:
            learner, log = checkpoint.go_on(kept, data, device, pool)
        else:
            learner, log = Learner(settings, data, device, pool), []
        each = learner.settings.instances * learner.settings.times
        while learner.iteration * each < episodes:
            log.append(learner.iterate(progress))
            checkpoint.keep(learner, log, kept)
            if told:
                told(log[-1])
    return learner, log


@contextmanager
def _pool(data: Data, jobs: int) -> Iterator[ProcessPoolExecutor | None]:
    if jobs < 2:
        yield None
        return
    # A process that plays takes and gives back the same large pieces of memory all the time. glibc would return them
    # to the system each time, which takes a third of the time.
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        os.environ.setdefault(name, str(2**32))
    context = multiprocessing.get_context("spawn")  # a fork would inherit threads' locks
    with ProcessPoolExecutor(jobs, context, ready, (data,)) as pool:
        try:
            yield pool
        except BaseException:
            for process in list(pool._processes.values()):
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
