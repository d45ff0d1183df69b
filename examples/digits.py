"""Train a small convolutional network on the handwritten digits that come with paceline.

python examples/digits.py                                                   # alone
paceline run --workers 4 --policy r2sp examples/digits.py                   # four workers
paceline run --workers 4 --policy bsp,r2sp --link 200Mbit --target accuracy=0.97 examples/digits.py   # compare two
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local-steps", type=int, help="steps of a worker between two exchanges; see docs/training.md")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)

    digits = load("digits")
    training = TensorDataset(digits.inputs / 255, digits.labels)

    model = torch.nn.Sequential(  # 273,000 parameters: an update is about 1 MB
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)

    def accuracy() -> float:
        """Return the share of the test set that the model recognizes."""
        model.eval()
        with torch.no_grad():
            predicted = model(digits.test_inputs / 255).argmax(1)
        model.train()
        return (predicted == digits.test_labels).float().mean().item()

    with paceline.join(model, optimizer, local_steps=arguments.local_steps) as session:
        batches = session.batches(training, arguments.batch_size, arguments.epochs, arguments.seed)
        for step, (x, y) in enumerate(batches, start=1):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            session.step(loss)
            if session.is_main and step % 2 == 0:
                session.log(accuracy=accuracy())  # for --target, --plot and the live table

        session.finish()  # wait for the other workers, and pull the final model
        if session.is_main:
            session.log(accuracy=accuracy())
            print(f"accuracy on the test set: {accuracy():.1%}")


if __name__ == "__main__":
    main()
