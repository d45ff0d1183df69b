"""Log the loss and the accuracy to a CSV file, and report them to paceline.

`paceline run --log tensorboard:runs` (or mlflow:URI, or wandb:PROJECT) logs what is reported, without a line here.
"""

import argparse
import csv

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.workloads.data import load


class CsvLogger:
    """Writes one line for each value: the step, the name and the value."""

    def __init__(self, path):
        self.file = open(path, "w", newline="")  # noqa: SIM115 - open for as long as the logger is
        self.writer = csv.writer(self.file)
        self.writer.writerow(["step", "name", "value"])

    def add_scalar(self, name, value, step):
        self.writer.writerow([step, name, f"{value:.6g}"])

    def close(self):
        self.file.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--metrics", metavar="FILE", default="metrics.csv")
    args = parser.parse_args()
    torch.manual_seed(0)

    digits = load("digits")
    training = TensorDataset(digits.inputs / 255, digits.labels)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    with paceline.join(model, optimizer) as session:
        writer = CsvLogger(args.metrics) if session.is_main else None  # for values of its own
        for step, (x, y) in enumerate(session.batches(training, batch_size=32, epochs=args.epochs)):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            session.step(loss)  # the trace records this loss
            if writer and step % 10 == 0:
                writer.add_scalar("loss", loss.item(), step)

        session.finish()  # wait for the other workers, and pull the final model
        if session.is_main:
            predicted = model(digits.test_inputs / 255).argmax(1)
            accuracy = (predicted == digits.test_labels).float().mean().item()
            session.log(accuracy=accuracy)  # while the worker is in the job
            writer.add_scalar("accuracy", accuracy, step)
            writer.close()
            print(f"accuracy: {accuracy:.1%}")


if __name__ == "__main__":
    main()
