"""Imports what all processes of a lab need. They are forked from a process that has imported this module."""

import gc
import os

import paceline.serve.server
import paceline.serve.worker.client

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # do not warn about hosts that have no DNS name
try:
    import torch

    import paceline.serve.shard.shard  # noqa: F401

    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter]).step()  # the first step loads much more than the import does
except ImportError:
    pass

gc.collect()
gc.freeze()  # these objects stay alive; collecting them again would stop each process for a tenth of a second
