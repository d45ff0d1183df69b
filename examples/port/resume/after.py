"""Classify handwritten digits. A checkpoint is saved after each epoch, and --resume continues from it."""

import argparse
import os
import shutil

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import paceline


def create_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def datasets():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    return TensorDataset(images[:1536], labels[:1536]), TensorDataset(images[1536:], labels[1536:])


def train(train_loader, model, criterion, optimizer, epoch, device):
    model.train()
    for i, (images, target) in enumerate(train_loader):
        images, target = images.to(device), target.to(device)
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 10 == 0:
            print(f"Epoch: [{epoch}][{i}/{len(train_loader)}]  Loss {loss.item():.4f}")


def validate(val_loader, model, device):
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, target in val_loader:
            images, target = images.to(device), target.to(device)
            correct += (model(images).argmax(dim=1) == target).sum().item()
    acc1 = 100 * correct / len(val_loader.dataset)
    print(f" * Acc@1 {acc1:.3f}")
    return acc1


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--start-epoch", type=int, default=0)
    parser.add_argument("-b", "--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--resume", metavar="PATH", help="continue from this checkpoint")
    parser.add_argument("--save-every", type=int, default=1, metavar="N", help="save after every N epochs")
    parser.add_argument("--checkpoint", metavar="PATH", default="checkpoint.pth.tar")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = create_model().to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum)
    session = paceline.join(model, optimizer)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.5)

    best_acc1 = 0
    if args.resume:
        print(f"=> loading checkpoint '{args.resume}'")
        checkpoint = torch.load(args.resume, map_location=device)
        args.start_epoch = checkpoint["epoch"]
        best_acc1 = checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        print(f"=> loaded checkpoint '{args.resume}' (epoch {checkpoint['epoch']})")

    train_dataset, val_dataset = datasets()
    train_loader = DataLoader(train_dataset, batch_size=args.batch_size, shuffle=True)
    train_loader = session.loader(train_loader, args.epochs - args.start_epoch, seed=args.start_epoch)
    val_loader = DataLoader(val_dataset, batch_size=256)

    for epoch in range(args.start_epoch, args.epochs):
        train(train_loader, model, criterion, optimizer, epoch, device)
        acc1 = validate(val_loader, model, device)
        scheduler.step()

        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        if (epoch + 1) % args.save_every == 0 and session.is_main:
            checkpoint = {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "best_acc1": best_acc1,
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }
            torch.save(checkpoint, args.checkpoint)
            if is_best:
                shutil.copyfile(args.checkpoint, os.path.join(os.path.dirname(args.checkpoint), "model_best.pth.tar"))


if __name__ == "__main__":
    main()
