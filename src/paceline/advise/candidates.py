"""The ways to train that are compared on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.policies import make
from paceline.simulate import ClusterSpec

DDP = "ddp"  # all-reduce among the workers: what PyTorch's DistributedDataParallel does
DILOCO = "diloco"  # all-reduce of the workers' differences, once in a round of local steps
RINGS = (DDP, DILOCO)  # without a server; both send float32, as DDP does, and DiLoCo in torchft by default
FEW_GROUPS = (2, 3)  # streamed groups that are compared; more of them have nearly the staleness of N turns
GROUPS = (2, 4)  # groups that are compared with local steps: their staleness costs more than that of gradients
UNEQUAL = 1.1  # workers are unequal if their compute times differ by more than this factor


@dataclass(frozen=True)
class Candidate:
    """A policy or all-reduce, with the way updates are applied, the place of the servers, and what is exchanged."""

    policy: str
    streamed: bool = False
    colocated: bool = False
    local_steps: int = 1  # H: steps between two exchanges
    updates: str = ""  # the codec of updates and models; "": float32
    overlap: bool = False  # the next round is computed during the exchange

    @property
    def name(self) -> str:
        """The candidate in words, such as "r2sp streamed, a server beside each worker"."""
        parts = [self.policy + (" streamed" if self.streamed else "")]
        parts += ["a server beside each worker"] if self.colocated else []
        parts += [f"{self.local_steps} local steps"] if self.local_steps > 1 else []
        parts += [self.updates] if self.updates else []
        return ", ".join(parts + (["overlapped"] if self.overlap else []))

    def on(self, spec: ClusterSpec) -> ClusterSpec:
        """Return the cluster with this candidate's servers and exchanges."""
        spec = replace(spec, local_steps=self.local_steps, updates=self.updates, overlap=self.overlap)
        return spec.colocated() if self.colocated else spec


def candidates(spec: ClusterSpec, local_steps: Sequence[int] = (1,), updates: str = "") -> list[Candidate]:
    """Return the candidates for a cluster, simplest set-up first.

    If two candidates are equally good, the earlier one is advised. local_steps: the numbers of steps between two
    exchanges that are compared. updates: the codec in which policies exchange; all-reduce sends float32.
    """
    found: list[Candidate] = []
    for steps in sorted(set(local_steps)):
        tried = _with_gradients(spec) if steps == 1 else _with_local_steps(spec)
        found += [replace(each, local_steps=steps, updates="" if each.policy in RINGS else updates) for each in tried]
    if spec.replicas:  # whole updates only, and the simulator knows backups of separate servers
        found = [each for each in found if not each.colocated and not each.streamed and "pipeline" not in each.policy]
    if len(spec.workers) == 1:
        found = [each for each in found if not each.colocated and each.policy not in RINGS]
    return [each for each in found if each.policy in RINGS or make(each.policy).least_workers <= len(spec.workers)]


def _with_gradients(spec: ClusterSpec) -> list[Candidate]:
    """Return the ways to exchange a gradient in every step."""
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
    return found + _with_tuned_batches(spec)


def _with_local_steps(spec: ClusterSpec) -> list[Candidate]:
    """Return the ways to exchange once in several steps."""
    found = [
        Candidate(DILOCO),
        Candidate(DILOCO, overlap=True),
        Candidate("bsp", colocated=True),
        Candidate("bsp", colocated=True, overlap=True),
        Candidate("bsp"),
        Candidate("bsp", overlap=True),
        Candidate("bsp:pipeline=true", colocated=True),
        Candidate("bsp:pipeline=true"),
        *(Candidate(f"r2sp:groups={M}") for M in GROUPS if len(spec.workers) > M),
        *(Candidate(f"r2sp:groups={M}", overlap=True) for M in GROUPS if len(spec.workers) > M),
        Candidate("r2sp", streamed=True, colocated=True),
        Candidate("r2sp", streamed=True),
        Candidate("r2sp"),
        Candidate("r2sp", overlap=True),
        Candidate("ssp"),
        Candidate("asp"),
    ]
    return found + _with_tuned_batches(spec)


def _with_tuned_batches(spec: ClusterSpec) -> list[Candidate]:
    if not has_unequal_workers(spec):
        return []
    return [
        Candidate("bsp:tune_batches=true", colocated=True),
        Candidate("bsp:tune_batches=true"),
        Candidate("r2sp:tune_batches=true", streamed=True, colocated=True),
        Candidate("r2sp:tune_batches=true", streamed=True),
        Candidate("r2sp:tune_batches=true"),
    ]


def has_unequal_workers(spec: ClusterSpec) -> bool:
    """Return whether the workers' compute times differ by more than the factor UNEQUAL."""
    times = [worker.compute_seconds() for worker in spec.workers]
    return max(times) > UNEQUAL * min(times)
