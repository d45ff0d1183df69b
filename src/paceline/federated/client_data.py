"""A client's share of a data set, to try a federation with data that all clients have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from paceline.federated.partition import Skew, dirichlet
from paceline.workloads.data import Data, load
from paceline.workloads.networks import accuracy, make


class ClientData:
    """Batches of one client's samples, in a new order for each iteration. An incomplete last batch is dropped."""

    def __init__(self, data: Data, samples: torch.Tensor, batch: int, seed: int) -> None:
        self.data, self.dataset, self._batch = data, samples, min(batch, len(samples))
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = self.dataset[torch.randperm(len(self.dataset), generator=self._generator)]
        for part in torch.split(order, self._batch):
            if len(part) == self._batch:
                yield self.data.prepared(self.data.inputs[part]), self.data.labels[part]


def share_of(
    client: int, clients: int, dataset: str, folder: Path | None, skew: Skew, samples: int, batch: int, seed: int
) -> ClientData:
    """Return the data of one of `clients` clients. With the same seed, all clients compute the same partition."""
    data = load(dataset, folder)
    samples = samples or max(1, len(data.labels) // clients)
    shares = dirichlet(data.labels, skew.alphas(clients, seed), samples, seed)
    return ClientData(data, shares[client], batch, seed * 1_000_003 + client)


def network_for(name: str, data: Data, seed: int) -> torch.nn.Module:
    """Return the network that all clients start with."""
    torch.manual_seed(seed)
    return make(name, data)


def tested(model: torch.nn.Module, data: Data) -> float:
    """Return the accuracy of the model on the test set."""
    model.eval()
    with torch.no_grad():
        parts = zip(torch.split(data.test_inputs, 1000), torch.split(data.test_labels, 1000), strict=True)
        right = sum(float(accuracy(model(data.prepared(inputs)), labels)) * len(labels) for inputs, labels in parts)
    return right / len(data.test_labels)
