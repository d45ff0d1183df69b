"""The hosts of a cluster in a lab, and the rates that their links reach."""

from __future__ import annotations

import secrets
import socket
from dataclasses import replace
from multiprocessing.connection import Connection

from paceline.lab import synthetic_worker
from paceline.lab.namespaces import Lab
from paceline.launch import link_probe
from paceline.simulate.cluster_spec import ClusterSpec

STREAM = 1.5  # seconds of the TCP stream that measures a link


def hosts(spec: ClusterSpec) -> dict[str, float]:
    """Return the hosts of a cluster with the rates of their links."""
    servers = {} if spec.colocate else {server_host(spec, number): spec.server_link for number in range(spec.servers)}
    servers |= {backup_host(spec, 0): spec.server_link} if spec.replicas and spec.servers == 1 else {}
    return servers | {worker_host(number): worker.link for number, worker in enumerate(spec.workers)}


def server_host(spec: ClusterSpec, shard: int) -> str:
    """Return the host of a shard."""
    return worker_host(shard) if spec.colocate else f"server{shard}"


def backup_host(spec: ClusterSpec, shard: int) -> str:
    """Return the host of a shard's backup: that of the next shard, or one of its own if there is no other shard."""
    return server_host(spec, (shard + 1) % spec.servers) if spec.servers > 1 else "backup0"


def worker_host(number: int) -> str:
    """Return the host of a worker."""
    return f"worker{number}"


def goodput(lab: Lab) -> float:
    """Return the rate that a bare TCP stream reaches between two hosts, as a share of the slower link's rate."""
    here, there = (list(lab.rates) * 2)[:2]
    token = secrets.token_bytes(link_probe.TOKEN_BYTES)
    ours, theirs = lab.pipe()
    serving = lab.start(there, _serve, theirs, token)
    theirs.close()
    (link,) = lab.call(here, link_probe.call, [(lab.address(there), ours.recv())], token, STREAM)
    lab.stop([serving])
    return float(min(link.up, link.down) / min(lab.rates[here], lab.rates[there]))


def _serve(pipe: Connection, token: bytes) -> None:
    with socket.create_server(("", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        link_probe.serve(listener, token)


def as_built(spec: ClusterSpec, share: float, streamed: bool) -> ClusterSpec:
    """Return the cluster as the simulator should see it to match the lab.

    Its links have the rates that a bare TCP stream reaches, and its updates the pieces that the real server makes.
    """
    dealt = synthetic_worker.description(spec.model_bytes).deal(spec.servers)
    workers = tuple(replace(worker, link=worker.link * share) for worker in spec.workers)
    slices = sum(len(pieces) for pieces in dealt) if streamed else spec.slices
    return replace(spec, server_link=spec.server_link * share, workers=workers, slices=slices)
