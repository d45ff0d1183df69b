"""Classify handwritten digits with PyTorch Lightning."""

import argparse
import os

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils import data

import paceline.lightning


class LitClassifier(pl.LightningModule):
    def __init__(self, hidden_dim=64, learning_rate=1e-2, batch_size=32):
        super().__init__()
        self.save_hyperparameters()
        self.l1 = nn.Linear(64, hidden_dim)
        self.l2 = nn.Linear(hidden_dim, 10)

    def forward(self, x):
        return self.l2(torch.relu(self.l1(x.flatten(1))))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("valid_loss", F.cross_entropy(self(x), y))

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_accuracy", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)

    def setup(self, stage):
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32) / 16
        dataset = data.TensorDataset(images, torch.tensor(digits.target))
        sizes = [1280, 256, len(dataset) - 1536]
        self.train_set, self.val_set, self.test_set = data.random_split(
            dataset, sizes, generator=torch.Generator().manual_seed(42)
        )

    def train_dataloader(self):
        return data.DataLoader(self.train_set, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return data.DataLoader(self.val_set, batch_size=256)

    def test_dataloader(self):
        return data.DataLoader(self.test_set, batch_size=256)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max_epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--default_root_dir", default=os.environ.get("PATH_RUNS", "runs"))
    parser.add_argument("--no_progress_bar", action="store_true")
    args = parser.parse_args()

    pl.seed_everything(1234)
    model = LitClassifier(learning_rate=args.learning_rate, batch_size=args.batch_size)
    trainer = pl.Trainer(
        max_epochs=args.max_epochs,
        default_root_dir=os.path.join(args.default_root_dir, "lightning"),
        strategy="paceline",
        enable_progress_bar=not args.no_progress_bar,
    )
    trainer.fit(model)
    trainer.test(model)


if __name__ == "__main__":
    main()
