"""HiPS as a communication hook of DistributedDataParallel.

This module does not postpone the evaluation of annotations, because DDP inspects those of a hook.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import distributed
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from paceline.collectives.reduce import TIMEOUT, AllReduce, CollectiveError
from paceline.collectives.topology import Topology

Hook: TypeAlias = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

_hooks_made = 0  # hooks made by this process; all ranks make theirs in the same order, so the numbers agree


def hips(
    net: Topology,
    stages: Sequence[str] = ("ring",),
    *,
    algorithm: str = "hips",
    timeout: float = TIMEOUT,
    nics: Mapping[int, str] | None = None,
) -> Hook:
    """Return a hook that averages gradients over the ranks of the default group. Rank r is server r of the network.

        model.register_comm_hook(None, paceline.collectives.hips(BCube(2, 2), ["ring", "mesh"]))

    All ranks must call this in the same order. If a rank dies, the backward pass of all others fails: at once for its
    peers, within ten seconds for the rest. If a rank hangs, that takes `timeout` seconds.
    """
    global _hooks_made
    if not distributed.is_initialized():
        raise CollectiveError(
            "Call torch.distributed.init_process_group first: the hook needs the ranks of the default group."
        )
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    if ranks != net.servers:
        raise CollectiveError(
            f"{net.name} has {net.servers} servers, but there are {ranks} ranks; the two numbers must be equal."
        )
    store = PrefixStore(f"paceline-collectives-{_hooks_made}", _get_default_store())
    _hooks_made += 1
    reduce = AllReduce(net, rank, store, algorithm, stages, timeout=timeout, nics=nics)

    def averaged(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        # DDP takes an exception that was set on a future for its result, so the future is waited for once more.
        return reduce.start(bucket.buffer(), divide=ranks).then(lambda done: done.wait())

    averaged.close = reduce.close  # type: ignore[attr-defined]  # to close it before the process ends
    return averaged
