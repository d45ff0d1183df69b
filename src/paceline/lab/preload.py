"""What the processes of a lab have in common, loaded once: they are forked from a process that has imported this."""

import gc
import os

import paceline.serve.server
import paceline.serve.worker.client

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a host without a name in any directory is no warning's worth
try:
    import torch

    import paceline.serve.shard.shard  # noqa: F401

    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter]).step()  # the first step loads far more than the import does
except ImportError:
    pass

gc.collect()
gc.freeze()  # what is here stays: to look through it again and again would stop each process for a tenth of a second
