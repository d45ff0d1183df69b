"""Whole clusters under a virtual clock."""

from paceline.simulate.cluster import Cluster, SimulationError, SimulationResult
from paceline.simulate.cluster_reader import ClusterError, builtin_names, load_cluster, parse_cluster
from paceline.simulate.cluster_spec import ClusterSpec, Jitter, WorkerSpec
from paceline.simulate.floor import limit_seconds, run_limit_seconds

__all__ = [
    "Cluster",
    "ClusterError",
    "ClusterSpec",
    "Jitter",
    "SimulationError",
    "SimulationResult",
    "WorkerSpec",
    "builtin_names",
    "limit_seconds",
    "load_cluster",
    "parse_cluster",
    "run_limit_seconds",
]
