"""A tiny GPT-2 that learns to count, and its Trainer. As a script it is a worker of a job, in a process of its own."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from paceline.huggingface import PacedTrainer

LENGTH, WORDS = 8, 23


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences of numbers, each one more than the one before."""

    def __init__(self, count: int) -> None:
        self.rows = (torch.arange(count)[:, None] * 7 + torch.arange(LENGTH)) % WORDS

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class CountingStream(IterableDataset[dict[str, torch.Tensor]]):
    """The same sequences, in the order of their numbers, without a length."""

    def __init__(self, count: int) -> None:
        self.rows = Counting(count)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.rows[index] for index in range(len(self.rows)))


def _gpt2() -> Any:
    torch.manual_seed(7)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model: Any = GPT2LMHeadModel
    return model(config)


TEMPLATE = _gpt2()  # made once: workers may be threads, which share torch's random numbers


def gpt2() -> Any:
    """Return a model. All of them have the same weights."""
    return copy.deepcopy(TEMPLATE)


def arguments(folder: Path | str, batch: int = 4, **options: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "learning_rate": 5e-3,
        "warmup_steps": 4,
        "adam_epsilon": 1e-6,  # the gradients of the keys' biases are zero but for rounding, which Adam would amplify
        "lr_scheduler_type": "linear",
        "weight_decay": 0.01,
        "max_grad_norm": 0.0,
        "num_train_epochs": 2,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=str(folder), per_device_train_batch_size=batch, **settings | options)


def main() -> None:
    folder, samples = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    options = eval(sys.argv[3]) if len(sys.argv) > 3 else {}
    trainer = PacedTrainer(gpt2(), arguments(folder, **options), train_dataset=Counting(samples))
    trainer.train()
    trainer.save_model()
    Path(folder, f"steps-{os.environ['PACELINE_WORKER']}").write_text(str(trainer.state.global_step))


if __name__ == "__main__":
    main()
