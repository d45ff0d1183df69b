"""The placement groups of a job, and the actors that are started in them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.ray import fork_server
from paceline.ray.coordinator_actor import CoordinatorActor
from paceline.ray.shard_actor import ShardActor
from paceline.ray.worker_actor import WorkerActor

log = logging.getLogger(__name__)

#: What Ray reserves for the coordinator and for each shard: a little memory, and no core, so that as many workers fit
#: as the cluster has cores.
SERVER_RESOURCES = {"memory": float(1 << 26)}
NOTE_SECONDS = 10.0  # between two notes that the job waits for free resources


@dataclass(frozen=True)
class Plan:
    """The number of actors of a job, and what each of them needs."""

    shards: int
    workers: int  # that the job begins with
    most_workers: int
    per_worker: Mapping[str, float]
    strategy: str = "PACK"  # of the workers
    colocate: bool = False  # whether shard N runs beside worker N
    server: Mapping[str, float] | None = None  # what the coordinator and each shard need
    fork: bool = False  # whether the actors of a node are forked from one process

    @property
    def per_server(self) -> dict[str, float]:
        return dict(self.server or SERVER_RESOURCES)


class Placement:
    """Reserves the resources of a job, and starts its actors on them.

    A lost node's part of a placement group moves to another node as soon as one has room. An actor that is started
    there waits until then.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._servers: Any = None
        self._workers: Any = None

    def wait(self) -> None:
        """Wait until the cluster has room for the job.

        All jobs reserve the resources of servers first, and each group at once. So two jobs never wait for each other.
        """
        plan = self._plan
        apart = 0 if plan.colocate else plan.shards
        self._servers = placement_group([plan.per_server] * (1 + apart), strategy="SPREAD")
        _wait(self._servers)
        beside = _sum(plan.per_worker, plan.per_server) if plan.colocate else dict(plan.per_worker)
        self._workers = placement_group([beside] * plan.workers, strategy=plan.strategy)
        _wait(self._workers)

    def coordinator(self) -> Any:
        """Start an actor for the coordinator."""
        return self._start(CoordinatorActor, self._plan.per_server, self._servers, 0)

    def shard(self, number: int) -> Any:
        """Start an actor for a shard."""
        group, bundle = (self._workers, number) if self._plan.colocate else (self._servers, 1 + number)
        return self._start(ShardActor, self._plan.per_server, group, bundle)

    def worker(self, number: int, runtime_env: Mapping[str, Any] | None = None) -> Any:
        """Start an actor for a worker. One beyond those that the job begins with waits until a node has room."""
        group = self._workers if number < self._plan.workers else None
        return self._start(WorkerActor, self._plan.per_worker, group, number, runtime_env, threads=2)

    def remove(self) -> None:
        """Give the resources back."""
        for group in filter(None, (self._workers, self._servers)):
            with contextlib.suppress(Exception):  # the cluster may be gone
                remove_placement_group(group)

    def _start(
        self,
        kind: type,
        resources: Mapping[str, float],
        group: Any,
        bundle: int,
        runtime_env: Mapping[str, Any] | None = None,
        threads: int | None = None,
    ) -> Any:
        where = "DEFAULT" if group is None else PlacementGroupSchedulingStrategy(group, bundle)
        others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU", "memory")}
        options: dict[str, Any] = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0)}
        options |= {"memory": resources["memory"]} if "memory" in resources else {}
        environment = dict(runtime_env or {}) | ({"py_executable": fork_server.launcher()} if self._plan.fork else {})
        options |= {"runtime_env": environment} if environment else {}
        options |= {"max_concurrency": threads} if threads else {}
        return ray.remote(kind).options(**options, resources=others, scheduling_strategy=where).remote()


def _wait(group: Any) -> None:
    while not group.wait(NOTE_SECONDS):
        log.warning("Waiting for free resources: the cluster has enough for this job, but others use them.")


def kill(actors: Sequence[Any]) -> None:
    """End these actors at once."""
    for actor in actors:
        with contextlib.suppress(Exception):  # it is dead, or the cluster is gone
            ray.kill(actor)


def on_drained_nodes(actors: Mapping[int, Any]) -> list[int]:
    """Return the keys of those actors whose nodes are drained: they will be taken away soon.

    Return none if Ray cannot be asked now: its head may be starting again.
    """
    try:
        drained = ray._private.state.state.get_draining_nodes()
        asked = actors if drained else {}
        found = {key: ray._private.state.actors(actor._actor_id.hex()) for key, actor in asked.items()}
    except Exception as error:
        log.warning("Ray does not say which nodes are drained: %s", error)
        return []
    return [key for key, actor in found.items() if actor and actor["Address"]["NodeID"] in drained]


def _sum(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {*one, *other}}
