"""Classify handwritten digits with a loop of Accelerate."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, random_split

import paceline


class DigitsDataset(Dataset):
    def __init__(self):
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        self.labels = torch.tensor(digits.target)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        return {"image": self.images[idx], "label": self.labels[idx]}


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


def training_function(config, args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    lr, num_epochs, seed, batch_size = config["lr"], config["num_epochs"], config["seed"], config["batch_size"]

    set_seed(seed)
    dataset = DigitsDataset()
    sizes = [1408, len(dataset) - 1408]
    train_split, eval_split = random_split(dataset, sizes, generator=torch.Generator().manual_seed(seed))
    train_dataloader = DataLoader(train_split, shuffle=True, batch_size=batch_size)
    eval_dataloader = DataLoader(eval_split, shuffle=False, batch_size=256)

    model = create_model().to(accelerator.device)
    optimizer = torch.optim.Adam(params=model.parameters(), lr=lr)
    session = paceline.join(model, optimizer)
    train_dataloader = session.loader(train_dataloader, num_epochs)
    lr_scheduler = CosineAnnealingLR(optimizer, T_max=num_epochs * len(train_dataloader))

    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(num_epochs):
        model.train()
        for batch in train_dataloader:
            batch = {k: v.to(accelerator.device) for k, v in batch.items()}
            outputs = model(batch["image"])
            loss = F.cross_entropy(outputs, batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

        model.eval()
        accurate, num_elems = 0, 0
        for batch in eval_dataloader:
            batch = {k: v.to(accelerator.device) for k, v in batch.items()}
            with torch.no_grad():
                outputs = model(batch["image"])
            predictions, references = accelerator.gather_for_metrics((outputs.argmax(dim=-1), batch["label"]))
            accurate += (predictions == references).sum().item()
            num_elems += len(references)
        accelerator.print(f"epoch {epoch}: {100 * accurate / num_elems:.2f}")

    if args.output_dir and session.is_main:
        accelerator.save_state(args.output_dir)
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    parser.add_argument("--output_dir", help="save the state to this folder")
    parser.add_argument("--num_epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=32)
    args = parser.parse_args()
    config = {"lr": 1e-2, "num_epochs": args.num_epochs, "seed": 42, "batch_size": args.batch_size}
    training_function(config, args)


if __name__ == "__main__":
    main()
