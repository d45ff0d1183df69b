"""The training script of `benchmarks/storm.py`: digits, and counters that prove each sample and each update.

The model has a network for the digits, and three parameters that count. An update adds one to the elements of its
samples in `once` and in `again`, which lie on different shards, and one to `updates`. The rate of the counters is 1, so
all their numbers are whole. The last line of the main worker gives the accuracy on the test set.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.model.optimizer import without_compiler
from paceline.workloads.data import load

ACCURACY = "The accuracy is "  # the first words of the line that gives it


class CountingNetwork(torch.nn.Module):
    """A small network, and the counters. Their order puts `once` and `again` at the two ends of the model."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.once = torch.nn.Parameter(torch.zeros(samples))
        self.network = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
        )
        self.updates = torch.nn.Parameter(torch.zeros(1))
        self.again = torch.nn.Parameter(torch.zeros(samples))

    def counted(self, samples: torch.Tensor) -> torch.Tensor:
        """Return a term of the loss by which SGD with a rate of 1 adds one to every counter of these samples."""
        return -(self.once[samples].sum() + self.again[samples].sum() + self.updates.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of each step in which the worker sleeps")
    arguments = parser.parse_args()
    without_compiler()  # importing torch's compiler takes two seconds in each process
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    digits = load("digits")
    count = len(digits.labels)
    training = TensorDataset(digits.inputs / 255, digits.labels, torch.arange(count))
    model = CountingNetwork(count)
    optimizer = torch.optim.SGD(
        [
            {"params": [model.once, model.updates, model.again], "lr": 1.0},
            {"params": model.network.parameters(), "lr": arguments.lr},
        ],
        lr=arguments.lr,
    )
    with paceline.join(model, optimizer) as session:
        for x, y, samples in session.batches(training, arguments.batch_size, arguments.epochs, arguments.seed):
            loss = F.cross_entropy(model.network(x), y)
            torch.autograd.backward(loss + model.counted(samples))
            time.sleep(arguments.pause)
            session.step(loss)
        session.finish()
        with torch.no_grad():
            predicted = model.network(digits.test_inputs / 255).argmax(1)
        print(f"{ACCURACY}{(predicted == digits.test_labels).float().mean().item():.4f}", flush=True)


if __name__ == "__main__":
    main()
