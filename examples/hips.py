"""DistributedDataParallel with HiPS: gradients are reduced level by level instead of in one ring.

torchrun --nproc-per-node 4 examples/hips.py          # four ranks on this machine, as servers of a BCube(2, 1)

On servers with two NICs, pass their names to `hips`: nics={0: "eth0", 1: "eth1"}.
"""

from __future__ import annotations

import torch
from torch import distributed
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from paceline.collectives import BCube, hips
from paceline.workloads.data import load


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()

    digits = load("digits")
    images, labels = digits.inputs.flatten(1) / 255, digits.labels
    samples = torch.arange(len(labels))[rank::ranks]  # of this rank

    network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    model = DistributedDataParallel(network)
    model.register_comm_hook(None, hips(BCube(2, 2), stages=["ring", "mesh"]))  # the only new line
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    count = len(labels) // ranks  # the same on every rank, so that all make the same number of steps
    for epoch in range(8):
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(epoch))
        for batch in samples[order][:count].split(16):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    if rank == 0:
        with torch.no_grad():
            predicted = network(digits.test_inputs.flatten(1) / 255).argmax(1)
        accuracy = (predicted == digits.test_labels).float().mean().item()
        print(f"accuracy on the test set: {accuracy:.1%}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
