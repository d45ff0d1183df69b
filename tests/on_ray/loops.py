"""Training functions for the tests on Ray.

`count` trains a model that counts: its weight i grows by 1 each time that sample i changes the model. So after E epochs
every weight is E, if each sample counted once an epoch and each update at most once.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.ray import get_dataset_shard
from paceline.workloads.data import load

HURRY = "hurry"
POLICY = "r2sp:weights=sum"  # each update counts with its full learning rate, which is 1


def count(config: dict[str, Any]) -> int:
    """Train the model that counts. config: samples, batch, epochs, pause (seconds) and notes (a folder).

    It pauses after each step until the folder has a file named hurry.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Module()
    model.counts = torch.nn.Parameter(torch.zeros(config["samples"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = TensorDataset(torch.arange(config["samples"]))
    notes = Path(config["notes"])
    with paceline.join(model, optimizer) as session:
        note = notes / f"{session.worker}-{os.getpid()}"
        for step, (numbers,) in enumerate(session.batches(data, config["batch"], config["epochs"]), start=1):
            loss = -model.counts[numbers].sum()
            loss.backward()  # type: ignore[no-untyped-call]
            session.step(loss)
            note.write_text(f"{step}")
            ends = time.monotonic() + config["pause"]
            while time.monotonic() < ends and not (notes / HURRY).exists():
                time.sleep(0.01)
    return session.worker


def classify(config: dict[str, Any]) -> None:
    """Train a small classifier of digits, and log its accuracy. config: lr and epochs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load("digits")
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    with paceline.join(model, optimizer) as session:
        data = TensorDataset(digits.inputs / 255, digits.labels)
        for x, y in session.batches(data, 32, config["epochs"]):
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            session.step(loss)
        session.finish()
        if session.is_main:
            session.log(accuracy=accuracy(model))


def classifier() -> torch.nn.Module:
    """Return the model of `classify`, without training."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def accuracy(model: torch.nn.Module) -> float:
    """Return the share of the test set that the model recognizes."""
    digits = load("digits")
    with torch.no_grad():
        found = model(digits.test_inputs / 255).argmax(1)
    return float((found == digits.test_labels).float().mean())


def fail_first(config: dict[str, Any]) -> None:
    """Fail before the first update."""
    raise RuntimeError("the data is missing")


def never_join(config: dict[str, Any]) -> None:
    """Train without paceline."""


def count_rows(config: dict[str, Any]) -> None:
    """Train the model that counts on the rows of a Ray Dataset. config: rows and epochs."""
    model = torch.nn.Module()
    model.counts = torch.nn.Parameter(torch.zeros(config["rows"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with paceline.join(model, optimizer) as session:
        for batch in session.batches(get_dataset_shard("train"), 4, config["epochs"]):
            loss = -model.counts[batch["id"]].sum()
            loss.backward()  # type: ignore[no-untyped-call]
            session.step(loss)


def never_close(config: dict[str, Any]) -> None:
    """Train the model that counts for one epoch, and leave the session open. config: samples."""
    model = torch.nn.Module()
    model.counts = torch.nn.Parameter(torch.zeros(config["samples"]))
    session = paceline.join(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for (numbers,) in session.batches(TensorDataset(torch.arange(config["samples"])), 4, 1):
        loss = -model.counts[numbers].sum()
        loss.backward()  # type: ignore[no-untyped-call]
        session.step(loss)
