"""HiPS as a communication hook of DistributedDataParallel.

Annotations are not postponed here: DDP looks at those of a hook.
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

_made = 0  # by this process: all ranks make theirs in the same order


def hips(
    net: Topology,
    stages: Sequence[str] = ("ring",),
    *,
    algorithm: str = "hips",
    timeout: float = TIMEOUT,
    nics: Mapping[int, str] | None = None,
) -> Hook:
    """A hook that averages gradients over the ranks of the default group: rank r is server r of the network.

        model.register_comm_hook(None, paceline.collectives.hips(BCube(2, 2), ["ring", "mesh"]))

    All ranks call it, in the same order. A rank that dies makes the backward pass of all others fail: at once for those
    who are its peers, within ten seconds for the rest; one that hangs, after `timeout` seconds.
    """
    global _made
    if not distributed.is_initialized():
        raise CollectiveError("Call torch.distributed.init_process_group first: the hook needs to know its ranks.")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    if ranks != net.servers:
        raise CollectiveError(
            f"{net.name} has {net.servers} servers, and there are {ranks} ranks; they must be as many."
        )
    store = PrefixStore(f"paceline-collectives-{_made}", _get_default_store())
    _made += 1
    reduce = AllReduce(net, rank, store, algorithm, stages, timeout=timeout, nics=nics)

    def averaged(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        # Waited for once more, because DDP takes an exception that a future was given for its result.
        return reduce.start(bucket.buffer(), divide=ranks).then(lambda done: done.wait())

    averaged.close = reduce.close  # type: ignore[attr-defined]  # for who wants it gone before the process is
    return averaged
