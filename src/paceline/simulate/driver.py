"""The simulator as a Driver, for the conformance suite and for quick looks at a policy."""

from __future__ import annotations

from paceline.observe.driver import Job
from paceline.observe.observer import Recorder
from paceline.observe.trace import Event
from paceline.policies import Policy
from paceline.simulate.cluster import Cluster
from paceline.simulate.cluster_spec import ClusterSpec, Jitter, WorkerSpec

BATCH = 32
LINK = 1e9  # bytes per second, of workers and servers


def simulated(policy: Policy, job: Job) -> list[Event]:
    """Drive a policy through a job on a small simulated cluster. Return the whole trace."""
    return _run(policy, job, cluster_for(job))


def colocated(policy: Policy, job: Job) -> list[Event]:
    """Do the same as `simulated`, with a server beside each worker."""
    return _run(policy, job, cluster_for(job).colocated())


def cluster_for(job: Job) -> ClusterSpec:
    """Return a cluster whose workers take as long as the job says, with a jitter of 10%.

    A worker sends the model in a tenth of the slowest worker's compute time. The lease is three times that compute
    time.
    """
    slowest = max(job.compute_seconds)
    jitter = Jitter("lognormal", 0.1)
    return ClusterSpec(
        name="job",
        model_bytes=0.1 * slowest * LINK,
        servers=2,
        server_link=LINK,
        latency=1e-3 * slowest,
        apply_rate=10 * LINK,
        lease=3 * slowest,
        workers=tuple(WorkerSpec(LINK, BATCH, BATCH / seconds, jitter=jitter) for seconds in job.compute_seconds),
        faults=job.faults,
    )


def _run(policy: Policy, job: Job, spec: ClusterSpec) -> list[Event]:
    events: list[Event] = []
    Cluster(spec, policy, job.iterations, job.seed, job.streamed, Recorder(events.append)).run()
    return events
