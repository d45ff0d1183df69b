"""The ways to train that are compared on a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.policies import make
from paceline.simulate import ClusterSpec

DDP = "ddp"  # all-reduce among the workers: what PyTorch's DistributedDataParallel does
FEW_GROUPS = (2, 3)  # streamed groups that are compared; more of them have nearly the staleness of N turns
UNEQUAL = 1.1  # workers are unequal if their compute times differ by more than this factor


@dataclass(frozen=True)
class Candidate:
    """A policy or all-reduce, with the way updates are applied and the place of the servers."""

    policy: str
    streamed: bool = False
    colocated: bool = False

    @property
    def name(self) -> str:
        """The candidate in words, such as "r2sp streamed, a server beside each worker"."""
        if self.policy == DDP:
            return DDP
        policy = self.policy + (" streamed" if self.streamed else "")
        return policy + (", a server beside each worker" if self.colocated else "")


def candidates(spec: ClusterSpec) -> list[Candidate]:
    """Return the candidates for a cluster, simplest set-up first.

    If two candidates are equally good, the earlier one is advised.
    """
    found = [
        Candidate(DDP),
        Candidate("bsp", colocated=True),
        Candidate("bsp"),
        Candidate("bsp:pipeline=true", colocated=True),
        Candidate("bsp:pipeline=true"),
        Candidate("r2sp:groups=auto"),
        *(Candidate(f"r2sp:groups={M}", streamed=True, colocated=True) for M in FEW_GROUPS if len(spec.workers) > M),
        Candidate("r2sp", streamed=True, colocated=True),
        Candidate("r2sp", streamed=True),
        Candidate("r2sp"),
        Candidate("ssp"),
        Candidate("dssp"),
        Candidate("dssp:bound=staleness"),
        Candidate("dssp:bound=none"),  # as the paper prints it
        Candidate("asp"),
        Candidate("asp", colocated=True),
    ]
    if has_unequal_workers(spec):
        found += [
            Candidate("bsp:tune_batches=true", colocated=True),
            Candidate("bsp:tune_batches=true"),
            Candidate("r2sp:tune_batches=true", streamed=True, colocated=True),
            Candidate("r2sp:tune_batches=true", streamed=True),
            Candidate("r2sp:tune_batches=true"),
        ]
    if spec.replicas:  # whole updates only, and the simulator knows backups of separate servers
        found = [each for each in found if not each.colocated and not each.streamed and "pipeline" not in each.policy]
    if len(spec.workers) == 1:
        found = [each for each in found if not each.colocated and each.policy != DDP]
    return [each for each in found if each.policy == DDP or make(each.policy).least_workers <= len(spec.workers)]


def has_unequal_workers(spec: ClusterSpec) -> bool:
    """Return whether the workers' compute times differ by more than the factor UNEQUAL."""
    times = [worker.compute_seconds() for worker in spec.workers]
    return max(times) > UNEQUAL * min(times)
