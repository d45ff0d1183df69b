"""Train on machines of different speeds. The policy gives slow workers smaller batches.

SLOW_WORKER=1 lets worker 1 wait 2 ms for each sample, so that one machine can show it.
"""

import argparse
import os
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.workloads.data import load


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    torch.manual_seed(0)

    digits = load("digits")
    training = TensorDataset(digits.inputs / 255, digits.labels)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    with paceline.join(model, optimizer) as session:
        is_slow = os.environ.get("SLOW_WORKER") == str(session.worker)
        sizes = []
        for x, y in session.batches(training, batch_size=32, epochs=args.epochs):
            time.sleep(len(x) * (0.002 if is_slow else 0.0005))
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            session.step(loss)
            sizes.append(len(x))
        print(f"worker {session.worker}: {len(sizes)} batches, of {sizes[0]} samples at first and {sizes[-2]} at last")

        session.finish()  # wait for the other workers, and pull the final model
        if session.is_main:
            predicted = model(digits.test_inputs / 255).argmax(1)
            print(f"accuracy: {(predicted == digits.test_labels).float().mean():.1%}")


if __name__ == "__main__":
    main()
