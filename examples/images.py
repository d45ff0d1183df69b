"""MNIST, Fashion-MNIST or CIFAR-10, from a folder with the files they are published in, with a small residual network.

python examples/images.py data/mnist                                                       # alone
paceline run --workers 4 --policy r2sp:weights=mean examples/images.py data/fashion-mnist  # together
paceline run --workers 2 examples/images.py data/cifar-10-batches-bin --epochs 10 --amp

The folder holds either the four IDX files of MNIST and its like (also with .gz), or CIFAR-10's batches, in the version
for C programs (data_batch_1.bin) or the one for Python (data_batch_1).
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

# Reading


def read_idx(path: Path) -> np.ndarray[Any, Any]:
    """An IDX file of bytes, zipped or not."""
    zipped = path.with_name(f"{path.name}.gz")
    raw = gzip.decompress(zipped.read_bytes()) if zipped.exists() else path.read_bytes()
    kind, dimensions = struct.unpack(">xxBB", raw[:4])
    if kind != 8 or len(raw) < 4 + 4 * dimensions:
        raise ValueError(f"{path} is not an IDX file of bytes.")
    shape = struct.unpack(f">{dimensions}I", raw[4 : 4 + 4 * dimensions])
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions)
    if values.size != np.prod(shape):
        raise ValueError(f"{path} is cut short: it should have {np.prod(shape)} values, and has {values.size}.")
    return values.reshape(shape)


class ArraysOnly(pickle.Unpickler):
    """Reads pickles of dictionaries and arrays, and nothing that could run code."""

    ALLOWED = frozenset({("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")})

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.ALLOWED or (module.endswith(".multiarray") and name == "_reconstruct"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"A batch of CIFAR-10 has no use for {module}.{name}; it is not read.")


def read_cifar(path: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images and labels of one batch of CIFAR-10, of either version."""
    if path.suffix == ".bin":
        rows = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, 3073)
        return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]
    batch = ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    return batch[b"data"].reshape(-1, 3, 32, 32), np.array(batch[b"labels"], np.uint8)


def read(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """What to train on, and what to test with. Pixels from 0 to 1, less the mean, over the deviation."""
    if (folder / "data_batch_1.bin").exists() or (folder / "data_batch_1").exists():
        suffix = ".bin" if (folder / "data_batch_1.bin").exists() else ""
        batches = [read_cifar(path) for path in sorted(folder.glob(f"data_batch_[0-9]{suffix}"))]
        images, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        test_images, test_labels = read_cifar(folder / f"test_batch{suffix}")
    elif any(folder.glob("train-images-idx3-ubyte*")):
        images, test_images = (read_idx(folder / f"{part}-images-idx3-ubyte")[:, None] for part in ("train", "t10k"))
        labels, test_labels = (read_idx(folder / f"{part}-labels-idx1-ubyte") for part in ("train", "t10k"))
    else:
        raise SystemExit(f"{folder} holds neither MNIST's four IDX files nor CIFAR-10's batches.")
    pixels = torch.from_numpy(images.astype(np.float32) / 255)
    mean, deviation = pixels.mean((0, 2, 3), keepdim=True), pixels.std((0, 2, 3), keepdim=True)
    tests = (torch.from_numpy(test_images.astype(np.float32) / 255) - mean) / deviation
    return (
        TensorDataset((pixels - mean) / deviation, torch.from_numpy(labels.astype(np.int64))),
        TensorDataset(tests, torch.from_numpy(test_labels.astype(np.int64))),
    )


# The model


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.around = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.around(x))


def resnet(channels: int, width: int = 16, blocks: int = 1) -> nn.Sequential:
    """Three stages of so many blocks, each half as large and twice as wide as the one before."""
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    before = width
    for stage in range(3):
        for block in range(blocks):
            layers.append(Block(before, width << stage, stride=2 if stage and not block else 1))
            before = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


# Training


def accuracy(model: nn.Module, tests: TensorDataset, device: torch.device) -> float:
    """Share of the images that the model gets right."""
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(x.to(device)).argmax(1) == y.to(device)).sum()) for x, y in DataLoader(tests, batch_size=500)
        )
    model.train()
    return right / len(tests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--width", type=int, default=16, help="of the first stage")
    parser.add_argument("--blocks", type=int, default=1, help="a stage; 3 make the ResNet-20 of CIFAR")
    parser.add_argument("--samples", type=int, help="train on the first so many only, to try it")
    parser.add_argument("--amp", action="store_true", help="mixed precision: bfloat16 autocast")
    parser.add_argument("--save", type=Path, help="where to save the trained model")
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
        paced = session.loader(loader, arguments.epochs)
        for epoch in range(arguments.epochs):
            for x, y in paced:
                with torch.autocast(device.type, torch.bfloat16, enabled=arguments.amp):
                    loss = F.cross_entropy(model(x.to(device)), y.to(device))
                loss.backward()
                session.step(loss)
            scheduler.step()
            if session.is_first:
                print(f"epoch {epoch + 1}: accuracy {accuracy(model, tests, device):.1%} on images not trained on")

    if arguments.save and session.is_first:
        torch.save(model.state_dict(), arguments.save)


if __name__ == "__main__":
    main()
