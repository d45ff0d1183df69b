"""The coordinator of a job as a Ray actor: the server without its shards, which are actors of their own."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import ray

from paceline.model import checkpoint
from paceline.model.export import export
from paceline.observe.observer import Observer, Recorder, Tee
from paceline.observe.summary import Summary
from paceline.observe.trace import as_line
from paceline.policies import make
from paceline.serve.job_options import JobOptions
from paceline.serve.server import Address, Server, ServerError
from paceline.serve.wire import certificates
from paceline.serve.wire.endpoint import is_loopback
from paceline.serve.wire.tls import Tls

PROBE = ".paceline-storage"  # a file by which the shards see whether they share the storage of the coordinator
MODEL = "model.pt"  # the plain state_dict in a job's last checkpoint


@dataclass(frozen=True)
class CoordinatorAddress:
    """The address of a coordinator, and the environment variables by which its peers know its certificate."""

    host: str
    port: int
    tls: dict[str, str]


@dataclass(frozen=True)
class JobStatus:
    """The state of a job, as its coordinator knows it.

    rows: the metrics since the last question, one dict for each time that a worker reported some.
    """

    version: int
    rows: list[dict[str, Any]]
    latest: dict[str, Any]  # the last value of each metric
    updated: frozenset[int]  # workers whose updates have changed the model
    has_members: bool  # whether a worker has joined since the server began or restored a checkpoint
    left: frozenset[int]  # workers that have left the job after their last step


class _MemberRecord(Observer):
    """An observer of the workers that come and go, and of the metrics that they report."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.latest: dict[str, Any] = {}
        self.is_empty = True
        self.gone: set[int] = set()
        self.updated: set[int] = set()
        self.version = 0

    def began(self, *_: object) -> None:
        self.is_empty = True
        self.gone.clear()

    def joined(self, time: float, worker: int, incarnation: int = 1) -> None:
        self.is_empty = False
        self.gone.discard(worker)

    def left(self, time: float, worker: int, lost: bool = False) -> None:
        if not lost:
            self.gone.add(worker)

    def applied(self, time: float, version: int, workers: tuple[int, ...], *_: object) -> None:
        self.version = version
        self.updated.update(workers)

    def progressed(self, time: float, epoch: int, done: int, total: int) -> None:
        self.latest["epoch"] = epoch

    def measured(self, time: float, worker: int, kind: str, value: float) -> None:
        self.latest[kind] = value
        row = {kind: value, "version": self.version, "seconds": time, "worker": worker}
        last = self.rows[-1] if self.rows else {}
        if kind not in last and all(last.get(key) == row[key] for key in ("version", "worker")):
            last[kind] = value  # one call of session.log with several metrics
        else:
            self.rows.append(row)


class CoordinatorActor:
    """Serves one job. If its process is lost, another actor continues from the last checkpoint in the storage."""

    def __init__(self) -> None:
        self._members = _MemberRecord()
        self._summary: Summary
        self._certificate = ""
        self._trace: IO[str] | None = None
        self._server: Server
        self._options: JobOptions

    async def start(self, options: bytes, token: bytes, insecure: bool, trace: str = "") -> CoordinatorAddress:
        """Begin to listen on this node's address. Raise ServerError with a sentence if that is not possible.

        insecure: do without TLS, although the address is not loopback. trace: a file for the events of the job.
        """
        host = ray.util.get_node_ip_address()
        known = JobOptions.from_json(options)
        assert known.saving is not None
        folder = known.saving.folder
        _check_storage(folder)
        resume = folder if checkpoint.newest(folder, quick=True) else None
        tls = None if insecure or is_loopback(host) else self._make_certificate()
        self._options = msgspec.structs.replace(known, host=host, tls=tls, insecure=insecure, resume=resume)
        self._summary = Summary(warm_up=2 * known.workers)  # actors start one after the other, which is no iteration
        self._server = Server(
            lambda: make(self._options.policy),
            self._options.server_config(token),
            Address(host, 0, insecure),
            tls=tls,
            observer=self._observer(trace),
            resume=resume,
            restarts=self._options.restarts,
            own_shards=False,
        )
        await self._server.start()
        return CoordinatorAddress(host, self._server.port, tls.for_peers().as_environment() if tls else {})

    async def serve(self) -> int:
        """Serve until all workers have left, and write a last checkpoint. Return the version of the model.

        Raise ServerError if the job cannot go on, or if its last checkpoint cannot be written.
        """
        try:
            if not await self._server.serve():
                raise ServerError(self._unsaved())
            return self._server.coordinator.state.version
        finally:
            await self._server.stop()
            if self._trace:
                self._trace.close()
            if self._certificate:
                shutil.rmtree(self._certificate, ignore_errors=True)

    async def status(self, seen: int) -> JobStatus:
        """Return the state of the job. seen: the number of rows of metrics that the caller knows.

        This is quick, because the workers wait meanwhile.
        """
        members = self._members
        return JobStatus(
            self._server.coordinator.state.version,
            members.rows[seen:],
            dict(members.latest),
            frozenset(members.updated),
            not members.is_empty,
            frozenset(members.gone),
        )

    async def figures(self) -> dict[str, Any]:
        """Return the figures of the run since this coordinator began."""
        report = self._summary.report()
        return {
            "updates": report.updates,
            "samples_per_second": report.samples_per_second,
            "iteration_seconds": report.mean_iteration_seconds,
            "mean_staleness": report.mean_staleness,
            "max_staleness": report.max_staleness,
            "lost": report.lost,
            "returned": report.returned,
        }

    async def export(self, target: str) -> None:
        """Write the model of the last checkpoint to this folder, as a state_dict that plain PyTorch loads."""
        assert self._options.saving is not None
        folder = Path(target)
        folder.mkdir(parents=True, exist_ok=True)
        export(self._options.saving.folder, folder / MODEL)

    def _observer(self, trace: str) -> Observer:
        observer = Tee(self._members, self._summary)
        if not trace:
            return observer
        file = self._trace = open(trace, "w", buffering=1)  # noqa: SIM115
        return Tee(observer, Recorder(lambda event: print(as_line(event), file=file)))

    def _unsaved(self) -> str:
        """Return the error of a job whose last checkpoint could not be written."""
        state = self._server.coordinator.state
        if state.checkpoints is not None and state.checkpoints.is_spoiled:
            return f"The model of version {state.version} holds numbers that are not finite; lower the learning rate."
        return (
            f"The last checkpoint, of version {state.version}, could not be written: free space in the storage_path, "
            "and run the job again with the same name, which continues from the checkpoint before."
        )

    def _make_certificate(self) -> Tls:
        self._certificate = tempfile.mkdtemp(prefix="paceline-")  # for its owner alone
        file = Path(self._certificate) / "certificate.pem"
        certificates.make(file)
        return Tls(str(file), str(file)).serving()


def _check_storage(folder: Path) -> None:
    """Raise ServerError if this node cannot write to the storage. Leave a file there for the shards to find."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PROBE).write_text(f"{os.getpid()}\n")
    except OSError as error:
        raise ServerError(
            f"The storage_path {str(folder)!r} cannot be written to on the coordinator's node ({error.strerror}): "
            "give RunConfig a folder that every node of the cluster can write to."
        ) from None
