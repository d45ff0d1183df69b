"""Jobs on a Ray cluster of several nodes, which are removed and added while the job trains."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed; `make test-ray` installs it")

from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray.train import FailureConfig, ScalingConfig

from on_ray.jobs import SECONDS, CountingJob, node_of

pytestmark = pytest.mark.slow

#: Ray notices a node that is gone after about three seconds instead of fifteen.
QUICK = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}
SERVERS = {"server": 1.0}  # a resource that only some nodes have, so that tests can tell where servers run


class Nodes:
    """A cluster whose head runs nothing but the driver."""

    def __init__(self) -> None:
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": QUICK},
        )
        ray.init(address=self.cluster.address, log_to_driver=False)
        self.known: dict[str, Any] = {}

    def add(self, cpus: int, servers: int = 0) -> str:
        """Add a node, and return its id."""
        node = self.cluster.add_node(num_cpus=cpus, resources={"server": servers} if servers else {})
        self.known[node.node_id] = node
        return str(node.node_id)

    def drain(self, node: str) -> None:
        """Tell the cluster that a node will be taken away."""
        reason = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION
        deadline = 1000 * (int(time.time()) + 120)
        accepted, why = ray._raylet.GcsClient(self.cluster.address).drain_node(node, reason, "preempted", deadline)
        assert accepted, why

    def remove(self, node: str) -> None:
        """Remove a node as a crash would, with all processes on it."""
        self.cluster.remove_node(self.known.pop(node), allow_graceful=False)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    ray.shutdown()
    made.cluster.shutdown()


def test_a_removed_node_of_workers(nodes: Nodes, tmp_path: Path) -> None:
    """Its workers are started again on another node, and the others go on."""
    nodes.add(cpus=2, servers=3)
    second, _ = nodes.add(cpus=1), nodes.add(cpus=1)
    job = CountingJob(
        tmp_path, scaling=ScalingConfig(num_workers=3, placement_strategy="SPREAD"), resources_per_server=SERVERS
    )
    job.start()
    job.until_saved(workers=3)
    lost = [number for number, actor in job.controller.worker_actors.items() if node_of(actor) == second]
    nodes.remove(second)
    assert len(lost) == 1
    nodes.add(cpus=1)
    job.until_back(lost[0])
    job.end()
    assert [len(job.processes(number)) for number in range(3) if number not in lost] == [1, 1]


def test_workers_leave_a_drained_node_after_their_push(nodes: Nodes, tmp_path: Path) -> None:
    nodes.add(cpus=2, servers=3)
    second = nodes.add(cpus=1)
    job = CountingJob(tmp_path, resources_per_server=SERVERS, failures=FailureConfig(max_failures=0), lease=60.0)
    job.start()
    job.until_saved(workers=3)
    (number,) = [number for number, actor in job.controller.worker_actors.items() if node_of(actor) == second]
    (process,) = job.processes(number)
    nodes.drain(second)
    job.until(lambda: not Path(f"/proc/{process}").exists(), "departure of the worker")
    nodes.remove(second)
    nodes.add(cpus=1)
    job.until_back(number)
    result = job.end()
    assert result.metrics["lost"] == 0  # it left, so nobody waited for its lease


def test_a_removed_node_of_a_shard(nodes: Nodes, tmp_path: Path) -> None:
    """The shard is started on another node, and the job goes back to its last checkpoint."""
    nodes.add(cpus=3)
    for _ in range(3):
        nodes.add(cpus=0, servers=1)
    job = CountingJob(tmp_path, servers=2, resources_per_server=SERVERS)
    job.start()
    job.until_saved(workers=3)
    nodes.add(cpus=0, servers=1)
    nodes.remove(node_of(job.controller.shard_actors[1]))
    job.end()


def test_a_removed_node_of_the_coordinator(nodes: Nodes, tmp_path: Path) -> None:
    """The coordinator is started on another node from the last checkpoint, and the workers join it there."""
    nodes.add(cpus=3)
    for _ in range(2):
        nodes.add(cpus=0, servers=1)
    job = CountingJob(tmp_path, resources_per_server=SERVERS)
    job.start()
    job.until_saved(workers=3)
    nodes.add(cpus=0, servers=1)
    nodes.remove(node_of(job.controller.coordinator_actor))
    job.end()


def test_an_elastic_job_takes_a_node_that_is_added(nodes: Nodes, tmp_path: Path) -> None:
    nodes.add(cpus=2, servers=2)
    job = CountingJob(tmp_path, workers=(2, 3), resources_per_server=SERVERS, failures=FailureConfig(max_failures=0))
    job.start()
    job.until_saved(workers=2)
    assert job.processes(2) == []
    nodes.add(cpus=1)
    job.until(lambda: bool(job.processes(2)), "a step of the third worker")
    job.end()


def test_jobs_that_do_not_fit_together_run_one_after_the_other(nodes: Nodes, tmp_path: Path) -> None:
    nodes.add(cpus=1, servers=2)
    jobs = [
        CountingJob(tmp_path / f"{number}", workers=1, epochs=1, resources_per_server=SERVERS) for number in range(2)
    ]
    for job in jobs:
        job.hurry()
        job.start()
    for job in jobs:
        job.join(SECONDS)
    for job in jobs:
        job.end()
