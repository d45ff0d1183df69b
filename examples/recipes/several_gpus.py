"""Train with several processes in each worker, one for each GPU of a host."""

import argparse
import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.workloads.data import load


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="of one process")
    parser.add_argument("--save", metavar="FILE", help="save the trained model to this file")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))

    digits = load("digits")
    training = TensorDataset(digits.inputs / 255, digits.labels)
    train_loader = DataLoader(training, batch_size=args.batch_size, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    session = paceline.join(model, optimizer)
    train_loader = session.loader(train_loader, args.epochs)
    samples = 0
    for _ in range(args.epochs):
        for x, y in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            samples += len(x)
    print(f"process {session.rank} of {session.world_size} trained on {samples} samples")

    if session.is_main:
        predicted = model((digits.test_inputs / 255).to(device)).argmax(1).cpu()
        print(f"accuracy: {(predicted == digits.test_labels).float().mean():.1%}")
        if args.save:
            torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
