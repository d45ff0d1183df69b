"""Checks of what a user gives to `PacelineTrainer`, before anything is started. Each refuses in one sentence."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray

from paceline.policies import PolicyError, make

Resources = Mapping[str, float]
OTHER_PYTHON = ("py_executable", "pip", "uv", "conda", "container", "image_uri")  # parts of a runtime environment
UNITS = {"CPU": ("CPU", "CPUs"), "GPU": ("GPU", "GPUs")}


def check_policy(policy: str, workers: int, apply: str) -> None:
    """Raise ValueError if the policy cannot be made or needs more workers, or if `apply` is no way of applying."""
    if apply not in ("whole", "streamed"):
        raise ValueError(f"apply must be 'whole' or 'streamed', not {apply!r}.")
    try:
        least = make(policy).least_workers
    except PolicyError as error:
        raise ValueError(str(error)) from None
    if least > workers:
        raise ValueError(f"{policy} needs at least {least} workers: give ScalingConfig num_workers={least}.")


def check_scaling(scaling: Any, servers: int, colocate: bool) -> None:
    """Raise ValueError if the numbers of workers and servers cannot be used."""
    if scaling.min_workers < 1:
        raise ValueError(f"A job needs at least 1 worker: give ScalingConfig num_workers=1, not {scaling.num_workers}.")
    if servers < 1:
        raise ValueError(f"A job needs at least 1 server for the model, not {servers}.")
    if colocate and scaling.min_workers != scaling.max_workers:
        raise ValueError("With colocate=True each worker has a shard, so give ScalingConfig one number of workers.")


def check_run(run: Any, fork: bool = False) -> None:
    """Raise ValueError if the run is configured in a way that paceline does not support."""
    others = [part for part in OTHER_PYTHON if part in (run.worker_runtime_env or {})]
    if fork and others:
        raise ValueError(f"Forked workers cannot have a Python of their own: leave fork=True or {others[0]!r} out.")
    if run.checkpoint_config.checkpoint_score_attribute:
        raise ValueError("paceline keeps the last checkpoints, not the best: leave checkpoint_score_attribute out.")
    if run.storage_filesystem is not None or urlsplit(str(run.storage_path)).scheme not in ("", "file"):
        raise ValueError(
            f"The shards write checkpoints as files, so storage_path must be a folder that all nodes share, "
            f"not {str(run.storage_path)!r}."
        )


def job_folder(storage: str, name: str) -> Path:
    """Return the folder of a run, which exists then. Raise ValueError if it cannot be made or written to."""
    folder = Path(os.path.abspath(os.path.expanduser(urlsplit(str(storage)).path))) / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(folder, os.W_OK | os.X_OK)
        reason = "no permission"
    except OSError as error:
        is_writable, reason = False, error.strerror or str(error)
    if not is_writable:
        raise ValueError(f"storage_path: {str(folder)!r} cannot be written to ({reason}); give RunConfig another one.")
    return folder


def check_resources(workers: int, per_worker: Resources, servers: Sequence[Resources] = ()) -> None:
    """Raise ValueError if the cluster cannot hold the workers and the servers, whatever else runs there.

    A cluster that can grow counts at its largest size.
    """
    total = _most_resources()
    needed: dict[str, float] = {name: workers * amount for name, amount in per_worker.items()}
    for each in servers:
        for name, amount in each.items():
            needed[name] = needed.get(name, 0.0) + amount
    missing = {name: amount - total.get(name, 0.0) for name, amount in needed.items() if amount > total.get(name, 0.0)}
    if missing:
        some = ", ".join(_amount(name, amount) for name, amount in missing.items())
        wants = ", ".join(_amount(name, needed[name]) for name in missing)
        has = ", ".join(_amount(name, total.get(name, 0.0)) for name in missing)
        raise ValueError(
            f"The cluster is short of {some}: {workers} workers need {wants}, and it has {has}; "
            "give ScalingConfig fewer workers, or add nodes."
        )
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not _can_grow() and not any(_fits(per_worker, node) for node in nodes):
        wants = ", ".join(_amount(name, amount) for name, amount in per_worker.items())
        raise ValueError(f"No node of the cluster has {wants}, which one worker needs: lower resources_per_worker.")


def _can_grow() -> bool:
    return bool(_configured_resources())


def _configured_resources() -> dict[str, float]:
    """Return the resources that the cluster can grow to by its autoscaler; nothing without one."""
    found = ray._private.state.state.get_max_resources_from_cluster_config()
    return dict(found or {})


def _most_resources() -> dict[str, float]:
    """Return the resources of all nodes, now or after the cluster has grown."""
    now, later = ray.cluster_resources(), _configured_resources()
    return {name: max(now.get(name, 0.0), later.get(name, 0.0)) for name in {*now, *later}}


def _fits(needed: Resources, node: Resources) -> bool:
    return all(node.get(name, 0.0) >= amount for name, amount in needed.items())


def _amount(name: str, amount: float) -> str:
    """Return an amount of a resource in words, such as "2 CPUs"."""
    one, many = UNITS.get(name, (f"of {name}", f"of {name}"))
    return f"{amount:g} {one if amount == 1 else many}"
