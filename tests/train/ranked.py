"""A training script for tests of ranks: `python ranked.py FOLDER CASE`.

It forks all ranks of a worker, so that they do not import torch one by one. Each rank writes its result to one file
and its errors to another.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline

SAMPLES, EPOCHS, BATCH = 38, 3, 6  # the last batch of an epoch has 2 samples for all ranks together


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def loaded() -> dict[str, Any]:
    """Return other weights than those of `model`."""
    return {name: value * 0.5 for name, value in model().state_dict().items()}


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (SAMPLES,), generator=generator), torch.arange(SAMPLES))


def train(net: Any, batch_size: int, case: str = "", rank: int = 0) -> tuple[list[int], bool]:
    """Train, and return the samples that were seen and whether this is the main process."""
    seen: list[int] = []
    scaled = case == "scaled"
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    with paceline.join(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)) as session:
        if case == "loads":
            net.load_state_dict(loaded())
        for step, (x, y, number) in enumerate(session.batches(dataset(), batch_size, EPOCHS)):
            if case == "dies" and rank == 1 and step == 2:
                os._exit(1)
            loss = F.cross_entropy(net(x), y)
            if scaled and step == 4 and rank == 1:
                loss = loss * float("inf")  # in one rank only
            scaled_loss: Any = scaler.scale(loss)
            scaled_loss.backward()
            session.step(loss, scaler=scaler)
            seen += number.tolist()
        if case == "logs":  # two workers of two ranks each
            assert (session.world_size, session.rank) == (4, 2 * session.worker + rank)
            session.log(rank=rank, samples=len(seen))
        return seen, session.is_main


class Stream(IterableDataset[Any]):
    """All samples of the dataset but the last, as a stream."""

    def __iter__(self) -> Iterator[Any]:
        whole: Any = dataset()
        return itertools.islice(whole, SAMPLES - 1)


def train_on_stream(net: Any, batch_size: int) -> tuple[list[int], bool]:
    """Train on a stream whose parts are unequal, and return the samples that were seen."""
    seen: list[int] = []
    with paceline.join(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)) as session:
        assert (session.world_size, session.rank) == (
            int(os.environ["PACELINE_RANKS"]),
            int(os.environ["PACELINE_RANK"]),
        )
        loader = session.loader(DataLoader(Stream(), batch_size), EPOCHS)
        for _ in range(EPOCHS):
            for x, y, number in loader:
                loss: Any = F.cross_entropy(net(x), y)
                loss.backward()
                session.step()
                seen += number.tolist()
        return seen, session.is_main


def work(rank: int, ranks: int, folder: Path, case: str) -> None:
    """Run one of the ranks."""
    torch.set_num_threads(1)
    if case == "own group":  # the script's own process group, at the same address
        distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    net = model()
    if rank:
        with torch.no_grad():
            net[0].weight.zero_()  # only the weights of rank 0 count
    if case == "stream":
        seen, is_main = train_on_stream(net, BATCH // ranks)
    else:
        seen, is_main = train(net, BATCH // ranks, case, rank)
    if case == "own group":
        total = torch.tensor([float(rank + 1)])
        distributed.all_reduce(total)
        assert total.item() == ranks * (ranks + 1) / 2
        distributed.destroy_process_group()
    weights = [weight for parameter in net.parameters() for weight in parameter.flatten().tolist()]
    (folder / f"{rank}.json").write_text(json.dumps({"seen": seen, "weights": weights, "is_main": is_main}))


def main() -> None:
    import torch._dynamo  # noqa: F401 (imported before the fork, so that not every rank imports it)

    folder, case, ranks = Path(sys.argv[1]), sys.argv[2], int(os.environ["PACELINE_RANKS"])
    for rank in range(ranks):
        if os.fork() == 0:
            os.environ["PACELINE_RANK"] = str(rank)
            os.dup2(os.open(folder / f"{rank}.errors", os.O_WRONLY | os.O_CREAT), 2)
            return work(rank, ranks, folder, case)
    for _ in range(ranks):
        os.wait()


if __name__ == "__main__":
    main()
