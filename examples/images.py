"""Train a small residual network on MNIST, Fashion-MNIST or CIFAR-10.

python examples/images.py data/mnist                                                       # alone
paceline run --workers 4 --policy r2sp examples/images.py data/fashion-mnist  # four workers
paceline run --workers 2 examples/images.py data/cifar-10-batches-bin --epochs 10 --amp

The folder contains the published files: the four IDX files of MNIST or Fashion-MNIST (or their .gz files), or the
batches of CIFAR-10, in the binary version (data_batch_1.bin) or the Python version (data_batch_1).
"""

from __future__ import annotations

import argparse
import gzip
import io
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline

# Data


def read_idx(path: Path) -> np.ndarray[Any, Any]:
    """Read an IDX file of bytes, or its .gz file if there is one."""
    compressed = path.with_name(f"{path.name}.gz")
    raw = gzip.decompress(compressed.read_bytes()) if compressed.exists() else path.read_bytes()
    kind, dimensions = struct.unpack(">xxBB", raw[:4])
    if kind != 8 or len(raw) < 4 + 4 * dimensions:
        raise ValueError(f"{path} is not an IDX file of bytes.")
    shape = struct.unpack(f">{dimensions}I", raw[4 : 4 + 4 * dimensions])
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions)
    if values.size != np.prod(shape):
        raise ValueError(f"{path} is incomplete: it should have {np.prod(shape)} values, but has {values.size}.")
    return values.reshape(shape)


class ArraysOnly(pickle.Unpickler):
    """An unpickler for dictionaries and arrays. It refuses everything that could run code."""

    ALLOWED = frozenset({("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")})

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.ALLOWED or (module.endswith(".multiarray") and name == "_reconstruct"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"A batch of CIFAR-10 must not contain {module}.{name}; the file is refused.")


def read_cifar(path: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Read the images and labels of one batch of CIFAR-10, of either version."""
    if path.suffix == ".bin":
        rows = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, 3073)
        return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]
    batch = ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    return batch[b"data"].reshape(-1, 3, 32, 32), np.array(batch[b"labels"], np.uint8)


def read(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """Read the training set and the test set. Pixels are normalized by the mean and deviation of the training set."""
    if (folder / "data_batch_1.bin").exists() or (folder / "data_batch_1").exists():
        suffix = ".bin" if (folder / "data_batch_1.bin").exists() else ""
        batches = [read_cifar(path) for path in sorted(folder.glob(f"data_batch_[0-9]{suffix}"))]
        images, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        test_images, test_labels = read_cifar(folder / f"test_batch{suffix}")
    elif any(folder.glob("train-images-idx3-ubyte*")):
        images, test_images = (read_idx(folder / f"{part}-images-idx3-ubyte")[:, None] for part in ("train", "t10k"))
        labels, test_labels = (read_idx(folder / f"{part}-labels-idx1-ubyte") for part in ("train", "t10k"))
    else:
        raise SystemExit(f"{folder} contains neither the four IDX files of MNIST nor the batches of CIFAR-10.")
    pixels = torch.from_numpy(images.astype(np.float32) / 255)
    mean, deviation = pixels.mean((0, 2, 3), keepdim=True), pixels.std((0, 2, 3), keepdim=True)
    tests = (torch.from_numpy(test_images.astype(np.float32) / 255) - mean) / deviation
    return (
        TensorDataset((pixels - mean) / deviation, torch.from_numpy(labels.astype(np.int64))),
        TensorDataset(tests, torch.from_numpy(test_labels.astype(np.int64))),
    )


# The model


class Block(nn.Module):
    """A residual block: two convolutions and a shortcut."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(residual + self.shortcut(x))


def resnet(channels: int, width: int = 16, blocks: int = 1) -> nn.Sequential:
    """Return a network of three stages of `blocks` blocks. Each stage halves the resolution and doubles the width."""
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    width_in = width
    for stage in range(3):
        for block in range(blocks):
            layers.append(Block(width_in, width << stage, stride=2 if stage and not block else 1))
            width_in = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width_in, 10))


# Training


def evaluate(model: nn.Module, tests: TensorDataset, device: torch.device) -> float:
    """Return the accuracy of the model on the test set."""
    model.eval()
    with torch.no_grad():
        correct = sum(
            int((model(x.to(device)).argmax(1) == y.to(device)).sum()) for x, y in DataLoader(tests, batch_size=500)
        )
    model.train()
    return correct / len(tests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage")
    parser.add_argument("--blocks", type=int, default=1, help="blocks per stage; 3 give the ResNet-20 of CIFAR")
    parser.add_argument("--samples", type=int, help="train on this number of samples only")
    parser.add_argument("--amp", action="store_true", help="mixed precision: bfloat16 autocast")
    parser.add_argument("--save", type=Path, help="save the trained model to this file")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    training, tests = read(arguments.folder)
    if arguments.samples:
        training = TensorDataset(*training[: arguments.samples])
    model = resnet(training[0][0].shape[0], arguments.width, arguments.blocks).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs)
    loader = DataLoader(training, arguments.batch_size, shuffle=True, drop_last=True)

    with paceline.join(model, optimizer) as session:
        loader = session.loader(loader)
        for epoch in range(1, arguments.epochs + 1):
            for x, y in loader:
                with torch.autocast(device.type, torch.bfloat16, enabled=arguments.amp):
                    loss = F.cross_entropy(model(x.to(device)), y.to(device))
                loss.backward()
                session.step(loss)
            scheduler.step()
            if epoch == arguments.epochs:
                session.finish()  # wait for the other workers, and pull the final model
            if session.is_main:
                accuracy = evaluate(model, tests, device)
                session.log(accuracy=accuracy)
                print(f"epoch {epoch}: accuracy {accuracy:.1%} on the test set")

    if arguments.save and session.is_main:
        torch.save(model.state_dict(), arguments.save)


if __name__ == "__main__":
    main()
