"""One client of a federation, with a model and data of its own."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from paceline.federated import FederatedClient
from paceline.workloads.data import load


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client", type=int, default=0, help="the number of this client")
    parser.add_argument("--connect", metavar="HOST:PORT", help="the server's address")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()

    digits = load("digits")
    images, labels = digits.inputs / 255, digits.labels
    mine = [i for i in range(len(labels)) if int(labels[i]) % 3 == args.client % 3]  # this client's own digits
    batches = DataLoader(Subset(TensorDataset(images, labels), mine), batch_size=16, shuffle=True, drop_last=True)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    client = FederatedClient(
        model,
        batches,
        connect=args.connect,
        client=args.client,
        steps=10,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        progress=lambda number, loss: print(f"round {number}: loss {loss:.3f}"),
    )
    client.run(args.rounds)

    predicted = model(digits.test_inputs / 255).argmax(1)
    accuracy = (predicted == digits.test_labels).float().mean().item()
    print(f"client {args.client} has digits {sorted({int(labels[i]) for i in mine})}; accuracy on all: {accuracy:.1%}")


if __name__ == "__main__":
    main()
