"""Classify handwritten digits with a small convolutional network.

--data names a folder with the four files of MNIST. Without it, the script trains on the small digits of scikit-learn,
enlarged to the same size.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset


class MNIST(Dataset):
    def __init__(self, folder, train):
        part = "train" if train else "t10k"
        self.images = self.read(Path(folder) / f"{part}-images-idx3-ubyte", header=16).reshape(-1, 28, 28)
        self.labels = self.read(Path(folder) / f"{part}-labels-idx1-ubyte", header=8)

    @staticmethod
    def read(path, header):
        compressed = path.with_name(path.name + ".gz")
        raw = gzip.decompress(compressed.read_bytes()) if compressed.exists() else path.read_bytes()
        return np.frombuffer(raw, np.uint8, offset=header)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = torch.from_numpy(self.images[index].astype(np.float32)).unsqueeze(0)
        return (image / 255 - 0.1307) / 0.3081, int(self.labels[index])


def small_digits(train):
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    images = (F.interpolate(images, size=28) - 0.1307) / 0.3081
    chosen = (torch.arange(len(images)) % 5 != 0) == train
    return TensorDataset(images[chosen], torch.tensor(digits.target)[chosen])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(32 * 12 * 12, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"epoch {epoch}  batch {batch_idx} of {len(train_loader)}  loss {loss.item():.4f}")


def test(model, device, test_loader):
    model.eval()
    total_loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            total_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += (output.argmax(dim=1) == target).sum().item()
    count = len(test_loader.dataset)
    print(f"test: loss {total_loss / count:.4f}, accuracy {correct / count:.1%}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="folder with the four MNIST files")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--test-batch-size", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7, help="factor of the learning rate after each epoch")
    parser.add_argument("--no-cuda", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--save-model", metavar="FILE", help="save the trained model to this file")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.no_cuda else "cpu")
    if args.data:
        train_set, test_set = MNIST(args.data, train=True), MNIST(args.data, train=False)
    else:
        print("no --data given: training on the small digits of scikit-learn")
        train_set, test_set = small_digits(train=True), small_digits(train=False)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=args.test_batch_size)

    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)

    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()

    if args.save_model:
        torch.save(model.state_dict(), args.save_model)


if __name__ == "__main__":
    main()
