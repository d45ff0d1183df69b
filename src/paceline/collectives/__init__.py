"""All-reduce on server-centric networks: HiPS (NetAI 2018) and the algorithms that the paper compares it with.

The same schedule is used three ways: by formula, in a flow-level simulation, and for real on torch.distributed.

    model.register_comm_hook(None, paceline.collectives.hips(paceline.collectives.BCube(2, 2), ["ring", "mesh"]))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.collectives.algorithms import ALGORITHMS, AlgorithmError, make
from paceline.collectives.topology import BCube, DCell, FatTree, Topology, TopologyError, Torus, topology

if TYPE_CHECKING:
    from paceline.collectives.hook import hips

__all__ = [
    "ALGORITHMS",
    "AlgorithmError",
    "BCube",
    "DCell",
    "FatTree",
    "Topology",
    "TopologyError",
    "Torus",
    "hips",
    "make",
    "topology",
]


def __getattr__(name: str) -> Any:
    if name == "hips":  # imported on first use, because it needs torch
        from paceline.collectives.hook import hips

        return hips
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
