"""Evaluate the model after each epoch in one worker, and keep the best one."""

import argparse
import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.workloads.data import load


def evaluate(model, loader):
    """Return the accuracy and the mean loss of the model on a data set."""
    model.eval()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for x, y in loader:
            scores = model(x)
            correct += int((scores.argmax(1) == y).sum())
            loss += float(F.cross_entropy(scores, y, reduction="sum"))
    model.train()
    return correct / len(loader.dataset), loss / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--save", metavar="FILE", default="best.pt")
    args = parser.parse_args()
    torch.manual_seed(0)

    digits = load("digits")
    train_loader = DataLoader(TensorDataset(digits.inputs / 255, digits.labels), batch_size=32, shuffle=True)
    test_loader = DataLoader(TensorDataset(digits.test_inputs / 255, digits.test_labels), batch_size=500)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    session = paceline.join(model, optimizer)
    train_loader = session.loader(train_loader)
    best, best_accuracy = None, 0.0
    for epoch in range(args.epochs):
        for x, y in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if epoch == args.epochs - 1:
            session.finish()  # wait for the other workers, and pull the final model
        if session.is_main:
            accuracy, loss = evaluate(model, test_loader)
            session.log(accuracy=accuracy, val_loss=loss)
            print(f"epoch {epoch}: accuracy {accuracy:.1%}, loss {loss:.3f}")
            if accuracy > best_accuracy:
                best, best_accuracy = copy.deepcopy(model.state_dict()), accuracy

    if session.is_main:
        torch.save(best, args.save)


if __name__ == "__main__":
    main()
