"""A tiny LightningModule that classifies, and its Trainer. As a script it is a worker of a job, in its own process."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline.lightning  # noqa: F401


def points(count: int, seed: int = 1) -> TensorDataset:
    """Points of the plane, and whether they lie in a circle."""
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return TensorDataset(x, (x.square().sum(1) < 0.6).long())


torch.manual_seed(3)
TEMPLATE = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))


class Circle(pl.LightningModule):
    """batch: of each training step. scheduled: a schedule that steps every batch, and momentum in the optimizer."""

    def __init__(self, batch: int, samples: int = 120, wrong: bool = False) -> None:
        super().__init__()
        self.net = copy.deepcopy(TEMPLATE)
        self.batch, self.samples, self.wrong = batch, samples, wrong
        self.validated: list[float] = []
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_epoch=True)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        loss = F.cross_entropy(self.net(x), 1 - y if self.wrong else y)
        self.log("val_loss", loss)
        if not self.trainer.sanity_checking:
            self.validated.append(float(loss))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test_accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> Any:
        return DataLoader(points(self.samples), batch_size=self.batch)

    def val_dataloader(self) -> Any:
        return DataLoader(points(64, seed=2), batch_size=64)

    def test_dataloader(self) -> Any:
        return DataLoader(points(64, seed=4), batch_size=64)


def trainer_of(folder: Path | str, strategy: Any = "paceline", **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(default_root_dir=str(folder), strategy=strategy, **settings | options)


def main() -> None:
    folder, samples = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    trainer = trainer_of(folder, **eval(sys.argv[3]))
    module = Circle(4, samples)
    trainer.fit(module)
    line = f"{trainer.current_epoch} {trainer.global_step} {min(module.rates)}"
    Path(folder, f"end-{os.environ['PACELINE_WORKER']}").write_text(line)


if __name__ == "__main__":
    main()
