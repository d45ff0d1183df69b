"""The controller of a job on Ray: it starts the actors, replaces those that are lost, and gathers the metrics.

It runs in the process that calls `PacelineTrainer.fit`. A lost worker is replaced alone, and the others go on. A lost
shard is replaced, and the coordinator goes back to the last checkpoint by itself. If the coordinator is lost, its
successor has another address, so the shards and the workers are started again too.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from paceline.model import checkpoint
from paceline.ray.coordinator_actor import JobStatus
from paceline.ray.dataset import BlockDataset
from paceline.ray.failures import JobFailed, cause_of, described
from paceline.ray.placement import NOTE_SECONDS, Placement, Plan, kill, on_drained_nodes
from paceline.ray.worker_actor import HasLeft, LoopRefused
from paceline.serve.environment import TOKEN, WORKER, WORKERS
from paceline.serve.job_options import JobOptions
from paceline.serve.restarts import RestartBudget, RestartLimit
from paceline.serve.serve_job import NO_UPDATE
from paceline.serve.server import ServerError
from paceline.serve.wire.tokens import token_for

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5  # between two questions about the state of the job
DRAIN_SECONDS = 2.0  # between two looks for nodes that are drained
ANSWER_SECONDS = 30.0  # that the coordinator has for an answer
UNLIMITED = RestartLimit(1 << 30)
SERVER_RESTARTS = RestartLimit(10, 600.0)  # if the user sets no limit: a server that always fails must end the job


@dataclass(frozen=True)
class JobTask:
    """The task of a job: its function and options, and the folder of its final model."""

    options: JobOptions
    function: Callable[..., Any]
    config: Mapping[str, Any] | None
    datasets: Mapping[str, BlockDataset]
    target: Path
    insecure: bool = False
    trace: str = ""  # a file for the events of the job
    runtime_env: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class _RunningWorker:
    number: int
    actor: Any
    call: Any  # of `run`
    is_leaving: bool = False  # whether it was asked to leave, because its node is drained


class Controller:
    """Runs one job."""

    def __init__(
        self, task: JobTask, placement: Placement, plan: Plan, failures: Any, callbacks: Sequence[Any] = ()
    ) -> None:
        """failures: the FailureConfig of Ray Train. callbacks: are told the metrics, as by Ray Train."""
        self._task, self._placement, self._plan, self._callbacks = task, placement, plan, callbacks
        self._worker_losses = RestartBudget(_limit(failures.max_failures))
        self._preemptions = RestartBudget(_limit(failures.max_preemption_failures))
        limit = failures.controller_failure_limit
        self._server_losses = RestartBudget(SERVER_RESTARTS if limit < 0 else RestartLimit(limit))
        self._token = secrets.token_bytes(16)
        self._arguments: tuple[Any, ...] = ()
        self._coordinator: Any = None
        self._address: Any = None  # the call that returns the CoordinatorAddress
        self._serving: Any = None  # the call that ends when the job is done
        self._asking: Any = None  # a call of `status` that is not answered yet
        self._seen = 0  # rows of metrics of this coordinator
        self._drain_looked = 0.0  # the time of the last look for drained nodes
        self._has_joined = False  # whether a worker has ever joined
        self._shards: dict[int, tuple[Any, Any]] = {}  # number → actor and call
        self._workers: dict[int, _RunningWorker] = {}
        self.returned: dict[int, Any] = {}  # what the function has returned, by worker
        self.rows: list[dict[str, Any]] = []  # all metrics that workers have reported
        self.metrics: dict[str, Any] = {}

    def run(self) -> None:
        """Run the job to its end. Raise JobFailed if it fails."""
        function = ray.put(self._task.function)
        self._arguments = (function, self._task.config, ray.put(dict(self._task.datasets)))
        self._start_all()
        while not self._look():
            pass
        status = self._ask()
        if not status.version:
            raise JobFailed(NO_UPDATE)
        self.metrics |= self._get(self._coordinator.figures.remote())
        self._wait_for_functions(status)
        self._get(self._coordinator.export.remote(str(self._task.target)))

    @property
    def coordinator_actor(self) -> Any:
        """The actor of the coordinator."""
        return self._coordinator

    @property
    def shard_actors(self) -> dict[int, Any]:
        """The actors of the shards, by number."""
        return {number: actor for number, (actor, _) in self._shards.items()}

    @property
    def worker_actors(self) -> dict[int, Any]:
        """The actors of the workers whose functions run, by number."""
        return {number: worker.actor for number, worker in self._workers.items()}

    def stop(self) -> None:
        """End all actors."""
        kill([worker.actor for worker in self._workers.values()])
        kill([actor for actor, _ in self._shards.values()])
        kill([self._coordinator] if self._coordinator else [])
        self._shards, self._workers = {}, {}

    def _look(self) -> bool:
        """Handle what has happened meanwhile. Return whether the job is done."""
        if self._asking is None:
            self._asking = self._coordinator.status.remote(self._seen)
        shards = {call: number for number, (_, call) in self._shards.items()}
        workers = {worker.call: worker for worker in self._workers.values()}
        calls = [self._serving, *shards, *workers]
        ended, _ = ray.wait(calls, num_returns=1, timeout=LOOK_SECONDS)
        answered, _ = ray.wait([self._asking], timeout=0)
        if answered:
            self._hear(self._asking)
            self._asking = None
        if self._serving in ended:
            return self._server_ended()
        for call in ended:
            if call in shards:
                self._replace_shard(shards[call], call)
            else:
                self._worker_ended(workers[call])
        if not self._is_anybody_there():
            self._all_ended()
        self._heed_drained_nodes()
        return False

    # Servers

    def _start_all(self) -> None:
        """Start all actors; the coordinator begins from the last checkpoint if there is one.

        Their processes start at the same time. The calls of the shards and the workers wait for the coordinator's
        address.
        """
        while True:
            self._coordinator = self._placement.coordinator()
            task = self._task
            self._address = self._coordinator.start.remote(
                task.options.to_json(), self._token, task.insecure, task.trace
            )
            for number in range(self._plan.shards):
                self._start_shard(number)
            for number in range(self._plan.most_workers):
                self._start_worker(number)
            try:
                self._get(self._address)
                break
            except RayActorError:
                self._count_server_loss("The coordinator was lost")
                self.stop()
        self._serving, self._asking, self._seen = self._coordinator.serve.remote(), None, 0

    def _server_ended(self) -> bool:
        """Return True if the job is done. Otherwise the coordinator is lost, or cannot go on: start again."""
        try:
            ray.get(self._serving)
            return True
        except RayActorError:
            why = "The coordinator was lost"
        except Exception as error:
            why = str(cause_of(error))
            if not isinstance(cause_of(error), ServerError) or self._checkpoint():
                raise JobFailed(why) from None
        self._count_server_loss(why)
        self.stop()
        self._start_all()
        return False

    def _replace_shard(self, number: int, call: Any) -> None:
        try:
            ray.get(call)
        except RayActorError:
            pass
        except Exception as error:
            raise JobFailed(str(cause_of(error))) from None
        self._count_server_loss(f"Shard {number} was lost")
        self._start_shard(number)

    def _start_shard(self, number: int) -> None:
        actor = self._placement.shard(number)
        assert self._task.options.saving is not None
        folder = str(self._task.options.saving.folder)
        token = token_for("shard", self._token)
        self._shards[number] = actor, actor.serve.remote(number, self._address, token, folder)

    def _count_server_loss(self, why: str) -> None:
        if not self._server_losses.spend(time.monotonic()):
            raise JobFailed(
                f"{why}, after servers were started again {self._server_losses.used}: run the job again with the same "
                "name, which continues from its last checkpoint, or raise FailureConfig's controller_failure_limit."
            )
        where = "its last checkpoint" if self._checkpoint() else "the beginning, since there is no checkpoint yet"
        log.warning("%s. The job continues from %s.", why.removesuffix("."), where)

    def _checkpoint(self) -> bool:
        """Return whether the job has a checkpoint to continue from."""
        saving = self._task.options.saving
        return saving is not None and checkpoint.newest(saving.folder, quick=True) is not None

    # Workers

    def _start_worker(self, number: int) -> None:
        actor = self._placement.worker(number, self._task.runtime_env)
        variables = {
            TOKEN: token_for("worker", self._token).hex(),
            WORKER: f"{number}",
            WORKERS: f"{self._plan.workers}",
        }
        function, config, datasets = self._arguments
        call = actor.run.remote(function, config, self._address, variables, datasets)
        self._workers[number] = _RunningWorker(number, actor, call)

    def _worker_ended(self, worker: _RunningWorker) -> None:
        """Take note of a worker whose function has returned, or start a lost worker again."""
        del self._workers[worker.number]
        try:
            result = ray.get(worker.call)
            worker.actor.__ray_terminate__.remote()  # a session that is still open leaves the job at exit
            if not isinstance(result, HasLeft):
                self.returned[worker.number] = result
                return
            budget, why, option = self._preemptions, "has left a drained node", "max_preemption_failures"
        except RayActorError as error:
            is_preempted = error.preempted or worker.is_leaving
            budget = self._preemptions if is_preempted else self._worker_losses
            why, option = "was lost", "max_preemption_failures" if is_preempted else "max_failures"
        except Exception as error:
            kill([worker.actor])
            budget, why, option = self._worker_losses, f"failed: {described(error)}", "max_failures"
            if not self._may_help(worker.number, cause_of(error)):
                raise JobFailed(f"Worker {worker.number} {why}") from cause_of(error)
        if not budget.spend(time.monotonic()):
            raise JobFailed(
                f"Worker {worker.number} {why.removesuffix('.')}. To start lost workers again, give RunConfig "
                f"FailureConfig({option}=…), more than {budget.count}."
            )
        log.warning("Worker %d %s. It is started again.", worker.number, why.removesuffix("."))
        self._start_worker(worker.number)

    def _heed_drained_nodes(self) -> None:
        """Ask the workers on nodes that will be taken away to leave after their push."""
        if time.monotonic() - self._drain_looked < DRAIN_SECONDS:
            return
        self._drain_looked = time.monotonic()
        staying = {number: worker.actor for number, worker in self._workers.items() if not worker.is_leaving}
        for number in on_drained_nodes(staying):
            log.warning("The node of worker %d is drained. The worker leaves after its push.", number)
            self._workers[number].is_leaving = True
            self._workers[number].actor.leave.remote()

    def _may_help(self, number: int, error: BaseException) -> bool:
        """Return whether a function that has raised an error may succeed if it is run again."""
        if isinstance(error, LoopRefused):
            return not error.is_lasting
        try:
            return number in self._ask().updated
        except JobFailed:
            return True  # the coordinator is lost, too

    def _is_anybody_there(self) -> bool:
        """Return whether a worker of those that the job began with still runs."""
        return any(number < self._plan.workers for number in self._workers)

    def _all_ended(self) -> None:
        """Start the workers again if the server has restored a checkpoint after they had ended."""
        if ray.wait([self._serving], timeout=LOOK_SECONDS)[0]:
            return
        try:
            status = self._ask()
        except JobFailed:
            return  # the coordinator is lost, which the next look finds
        if not self._has_joined:
            raise JobFailed("train_loop_per_worker never called paceline.join, so no worker took part in the job.")
        if status.has_members or ray.wait([self._serving], timeout=0)[0]:
            return
        log.warning("The server restored a checkpoint after all workers had ended. They are started again.")
        for number in range(self._plan.workers):
            self._start_worker(number)

    def _wait_for_functions(self, status: JobStatus) -> None:
        """Wait for functions that still run after the training. Workers that came too late to train are ended."""
        for worker in list(self._workers.values()):
            if worker.number not in status.left:
                continue
            try:
                self.returned[worker.number] = ray.get(worker.call)
            except RayActorError:
                log.warning("Worker %d was lost after the training.", worker.number)
            except Exception as error:
                raise JobFailed(f"Worker {worker.number} failed after the training: {described(error)}") from None

    # Metrics

    def _ask(self) -> JobStatus:
        """Return the state of the job as it is now. Raise JobFailed if the coordinator does not answer."""
        self._asking = None
        status = self._hear(self._coordinator.status.remote(self._seen))
        if status is None:
            raise JobFailed("The coordinator does not answer.")
        return status

    def _hear(self, answer: Any) -> JobStatus | None:
        """Take note of an answer of the coordinator, and tell the callbacks. Return None if there is no answer."""
        try:
            status: JobStatus = ray.get(answer, timeout=ANSWER_SECONDS)
        except (RayActorError, GetTimeoutError):
            return None  # if the coordinator is lost, its other call ends, too
        self._has_joined |= status.has_members
        self._seen += len(status.rows)
        self.rows += status.rows
        self.metrics = {**self.metrics, **status.latest, "version": status.version}
        for row in status.rows:
            for callback in self._callbacks:
                callback.after_report(None, [{**self.metrics, **row}], None)
        return status

    def _get(self, call: Any) -> Any:
        """Return the result of a call of the coordinator. Raise JobFailed if it fails, RayActorError if it is lost."""
        while not ray.wait([call], timeout=NOTE_SECONDS)[0]:
            log.warning("Waiting for the coordinator: a node must have room for it.")
        try:
            return ray.get(call)
        except RayActorError:
            raise
        except Exception as error:
            raise JobFailed(str(cause_of(error))) from None


def _limit(count: int) -> RestartLimit:
    return UNLIMITED if count < 0 else RestartLimit(count)
