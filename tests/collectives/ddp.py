"""Ranks of a DDP job, forked from one process. Each rank prints a line.

python ddp.py RANKS [kill|behead|hang|stop]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from itertools import pairwise

import torch
import torch._dynamo  # DDP would import this in each rank, which takes two seconds
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from paceline.collectives import BCube, Topology, Torus, hips

STEPS = 20
FAULT_AT = 5
AT_FIRST = ("behead", "stop")  # faults of rank 0, which hosts the store; the others strike the last rank


def network() -> torch.nn.Module:
    """Return a network with parameters of odd sizes."""
    torch.manual_seed(0)
    sizes = (13, 101, 57, 3)
    layers = [torch.nn.Linear(a, b) for a, b in pairwise(sizes)]
    return torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))


def compared(rank: int, net: Topology) -> dict[str, object]:
    """Return the largest relative difference between the gradients and those of plain DDP."""
    plain, hooked = (DistributedDataParallel(network(), bucket_cap_mb=0.01) for _ in range(2))
    hooked.register_comm_hook(None, hips(net, ["ring", "mesh"]))
    chance = random.Random(rank)
    worst = 0.0
    for step in range(STEPS):
        x = torch.randn(8, 13, generator=torch.Generator().manual_seed(1000 * rank + step))
        for model in (plain, hooked):
            model.zero_grad()
            time.sleep(0.02 * chance.random())
            model(x).pow(2).sum().backward()
        for a, b in zip(plain.parameters(), hooked.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            worst = max(worst, float((a.grad - b.grad).norm() / a.grad.norm()))
    return {"worst": worst}


def disturbed(rank: int, net: Topology, fault: str) -> dict[str, object]:
    """Return the error that a rank gets from a fault of another rank, and how many seconds that takes."""
    model = DistributedDataParallel(network(), bucket_cap_mb=0.01)
    model.register_comm_hook(None, hips(net, ["ring", "mesh"], timeout=300.0 if fault in ("kill", "behead") else 3.0))
    began = time.monotonic()
    try:
        for step in range(STEPS):
            if step == FAULT_AT and rank == (0 if fault in AT_FIRST else net.servers - 1):
                if fault in ("kill", "behead"):
                    os._exit(9)
                os.kill(os.getpid(), signal.SIGSTOP) if fault == "stop" else time.sleep(60)
            began = time.monotonic()
            model(torch.randn(8, 13)).pow(2).sum().backward()
    except RuntimeError as error:
        return {"error": str(error), "seconds": time.monotonic() - began}
    return {}


def run(rank: int, ranks: int, port: int, fault: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    net: Topology = BCube(2, 2) if ranks == 4 else Torus([3, 3])
    found = disturbed(rank, net, fault) if fault else compared(rank, net)
    sys.stdout.write(json.dumps({"rank": rank, **found}) + "\n")
    sys.stdout.flush()
    if fault:
        os._exit(0)  # DDP's own group may wait for the rank that is gone
    distributed.destroy_process_group()


def main() -> None:
    ranks, fault = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=run, args=(rank, ranks, port, fault)) for rank in range(ranks)]
    for process in processes:
        process.start()
    awaited = processes[1:] if fault in AT_FIRST else processes[: ranks - 1] if fault else processes
    for process in awaited:
        process.join(90)
    for process in processes:
        process.kill()


if __name__ == "__main__":
    main()
