"""The place of one process among all processes of a job."""

from __future__ import annotations

from paceline.train.backend import Backend


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
