"""Train a small convolutional network on the handwritten digits that come with paceline.

python examples/digits.py                                                   # alone
paceline run --workers 4 --policy r2sp:weights=mean examples/digits.py      # four workers
"""

from __future__ import annotations

import argparse

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.workloads.data import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    digits = load("digits")
    training = TensorDataset(digits.inputs / 255, digits.labels)

    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)

    with paceline.join(model, optimizer) as session:
        for x, y in session.batches(training, batch_size=arguments.batch_size, epochs=arguments.epochs):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            session.step(loss)

        session.finish()  # wait for the other workers, and pull the final model
        if session.is_main:
            model.eval()
            with torch.no_grad():
                predicted = model(digits.test_inputs / 255).argmax(1)
            accuracy = (predicted == digits.test_labels).float().mean().item()
            session.log(accuracy=accuracy)
            print(f"accuracy on the test set: {accuracy:.1%}")


if __name__ == "__main__":
    main()
