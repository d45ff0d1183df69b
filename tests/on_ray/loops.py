"""Training functions for the tests on Ray.

`count` trains a classifier of digits that counts its samples. So after E epochs every count is E, if each sample has
counted once an epoch and each update at most once.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.model.description import MIN_PIECE_ELEMENTS
from paceline.ray import get_dataset_shard
from paceline.serve.environment import CONNECT, address, job_token, worker_number
from paceline.serve.wire.tls import Tls
from paceline.serve.worker.client import Client
from paceline.workloads.data import load
from serve.workers import described

HURRY = "hurry"
SECOND = 0.02  # duration of one second of a job in `exchange`
POLICY = "r2sp:weights=sum"  # each update counts with its full learning rate, which is 1


class CountingClassifier(torch.nn.Module):
    """A linear classifier of digits that also counts: its count i grows by 1 each time that sample i changes it.

    A linear model learns as much in any order of the samples, and with some staleness. So its accuracy can be compared.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(samples))
        self.classifier = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

    def loss(self, images: torch.Tensor, labels: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.classifier(images), labels) - self.counts[numbers].sum()

    def optimizer(self) -> torch.optim.Optimizer:
        """Return an optimizer that adds 1 to the count of each sample."""
        groups = [{"params": [self.counts], "lr": 1.0}, {"params": self.classifier.parameters(), "lr": 0.1}]
        return torch.optim.SGD(groups)


def numbered_digits() -> TensorDataset:
    """Return the training set of digits, with the number of each sample."""
    digits = load("digits")
    return TensorDataset(digits.inputs / 255, digits.labels, torch.arange(len(digits.labels)))


def count(config: dict[str, Any]) -> int:
    """Train the classifier that counts. config: batch, epochs, pause (seconds) and notes (a folder).

    It pauses after each step until the folder has a file named hurry.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = numbered_digits()
    model = CountingClassifier(len(data))
    notes = Path(config["notes"])
    with paceline.join(model, model.optimizer()) as session:
        note = notes / f"{session.worker}-{os.getpid()}"
        for step, batch in enumerate(session.batches(data, config["batch"], config["epochs"]), start=1):
            loss = model.loss(*batch)
            loss.backward()  # type: ignore[no-untyped-call]
            session.step(loss)
            note.write_text(f"{step}")
            ends = time.monotonic() + config["pause"]
            while time.monotonic() < ends and not (notes / HURRY).exists():
                time.sleep(0.05)
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


def exchange(config: dict[str, Any]) -> None:
    """Push ones and wait instead of computing, until all workers together have made `goal` exchanges.

    config: seconds (of computing, one entry for each worker), goal, seed and notes (a folder).
    """
    number, notes = worker_number() or 0, Path(config["notes"])
    chance = random.Random(f"{config['seed']} {number}")
    size = 6 * MIN_PIECE_ELEMENTS  # several pieces for each shard, if updates are streamed
    weights, gradient = np.zeros(size, np.float32), np.ones(size, np.float32)
    where, tls = address(os.environ[CONNECT]), Tls.from_environment()
    client = Client(where, described(size), job_token(), number, tls=tls)
    others = [notes / f"{each}" for each in range(len(config["seconds"]))]
    try:
        granted = client.begin(weights.data.cast("B"))
        while sum(each.stat().st_size for each in others if each.exists()) < config["goal"]:
            seconds = config["seconds"][number] * chance.lognormvariate(0.0, 0.1) * SECOND
            time.sleep(seconds)
            granted = client.exchange(
                gradient.data.cast("B"),
                weights.data.cast("B"),
                batch_size=granted.batch_size or 32,
                compute_seconds=seconds,
                rates=(0.01,),
            )
            with others[number].open("a") as updates:  # one character for each: a number may be read half written
                updates.write(".")
    finally:
        client.close()
