"""How the processes that paceline starts on one host share its cores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

THREADS = "OMP_NUM_THREADS"  # PyTorch, MKL and OpenBLAS read this variable
#: By one of these variables, a user chooses how many threads a process uses.
USER_VARIABLES = (THREADS, "MKL_NUM_THREADS")
CGROUP = Path("/sys/fs/cgroup")


def available(cgroup: Path = CGROUP) -> int:
    """Return the number of cores that this process may use: at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _quota(cgroup)
    return max(1, cores if quota is None else min(cores, round(quota)))


def shared(processes: int) -> int:
    """Return the threads that each of several processes may use, so that they do not wait for each other's cores."""
    return max(1, available() // max(1, processes))


def shared_by_shards(shards: int, environment: Mapping[str, str]) -> int:
    """Return the threads of each shard. Shards of one host share its cores, and keep to the limit of all processes."""
    limit = environment.get(THREADS, "").partition(",")[0]
    return min(shared(shards), int(limit)) if limit.isdigit() and int(limit) else shared(shards)


def chosen(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which the user has chosen the number of threads. Without any, the dict is empty."""
    return {name: environment[name] for name in USER_VARIABLES if environment.get(name)}


def settings(processes: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that let `processes` processes of this host share its cores.

    One process may use all cores, as without paceline. A choice of the user stays.
    """
    if processes <= 1 or chosen(environment):
        return {}
    return {THREADS: str(shared(processes))}


def remote_settings(processes: int, environment: Mapping[str, str]) -> str:
    """Return a shell command that makes these settings on another host, from the number of its cores.

    environment: of this host. A choice of the user counts, on this host or on the other one.
    """
    if processes <= 1 or chosen(environment):
        return "true"
    is_chosen = "".join(f"${{{name}:-}}" for name in USER_VARIABLES)
    count = "$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)"
    return (
        f'{{ [ -n "{is_chosen}" ] || {{ cores={count}; cores=$((cores / {processes})); '
        f'export {THREADS}="$((cores > 1 ? cores : 1))"; }}; }}'
    )


def _quota(cgroup: Path) -> float | None:
    """Return the cores that a container may use on average, or None without a limit."""
    try:
        if (limit := cgroup / "cpu.max").exists():
            quota, period = limit.read_text().split()
        else:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float(quota) / float(period) if quota != "max" and float(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
