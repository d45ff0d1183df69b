"""Train on spot instances: a worker may vanish at any time, and another one may join."""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.workloads.data import load


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--pause", type=float, default=0.02, help="seconds that each step waits, as if the model were large"
    )
    args = parser.parse_args()
    torch.manual_seed(0)

    digits = load("digits")
    training = TensorDataset(digits.inputs / 255, digits.labels)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    with paceline.join(model, optimizer) as session:
        print(f"worker {session.worker} joined")
        for x, y in session.batches(training, batch_size=32, epochs=args.epochs):
            time.sleep(args.pause)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            session.step(loss)

        session.finish()  # wait for the other workers, and pull the final model
        predicted = model(digits.test_inputs / 255).argmax(1)
        print(f"worker {session.worker}: accuracy {(predicted == digits.test_labels).float().mean():.1%}")


if __name__ == "__main__":
    main()
