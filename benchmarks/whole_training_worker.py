"""One worker of benchmarks/whole_training.py: it trains a network on images, over paceline or over PyTorch's DDP.

Worker 0 copies its weights now and then, with the time. It tests the copies after the training, so testing takes no
time of it. The result is a file of JSON: [seconds, accuracy] of each copy, and samples per second of this worker.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.serve.environment import WORKER
from paceline.workloads import augmentation, networks
from paceline.workloads.data import Data, load
from paceline.workloads.resnet import Block, Mean
from paceline.workloads.weights import he_initialized

SEED = 0
WARM_UP = 0.2  # of the training, over which the learning rate rises; then it falls to 0
TIMED_STEPS = 8
TESTED = 500  # images that are tested together


def main() -> None:
    arguments = parsed()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    data = load(arguments.data, arguments.folder)
    data = (data.limited(arguments.samples) if arguments.samples else data).to(device)
    model = made(arguments.network, data).to(device)
    training = Training(arguments, data, model)
    (training.over_ddp if arguments.ddp else training.over_paceline)()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet18", help="resnet18 or a network of paceline.workloads")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--samples", type=int, help="train on this number of samples only")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128, help="of each worker")
    parser.add_argument("--rate", type=float, default=0.1, help="the highest learning rate of a step with all batches")
    parser.add_argument("--copies", type=int, default=4, help="copies of the weights in an epoch")
    parser.add_argument("--steps", type=int, default=0, help="stop after this many steps; 0: after all epochs")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that worker 0 computes longer in each step")
    parser.add_argument("--ddp", action="store_true", help="train over DDP: RANK, WORLD_SIZE and so on are set")
    parser.add_argument("--bucket", type=float, default=25.0, help="DDP's bucket size in MB")
    parser.add_argument("--overlap", action="store_true", help="push gradients while they are computed")
    parser.add_argument("--result", type=Path, help="the file that worker 0 writes")
    return parser.parse_args()


def made(name: str, data: Data) -> nn.Module:
    """Return a network. resnet18 has the four stages of the ImageNet network, for small images: 11 million weights.

    Each of its blocks begins as the identity, as Goyal et al. (2017) recommend for large batches.
    """
    if name != "resnet18":
        return networks.make(name, data)
    widths, inputs = (64, 128, 256, 512), 64
    layers: list[nn.Module] = [nn.Conv2d(data.inputs.shape[1], 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)]
    layers.append(nn.ReLU())
    for width in widths:
        for _ in range(2):
            block = Block(inputs, width)
            nn.init.zeros_(block.norm2.weight)
            layers.append(block)
            inputs = width
    last = nn.Linear(inputs, data.classes)
    return he_initialized(nn.Sequential(*layers, Mean(), last), last)


class Training:
    """The training of one worker."""

    def __init__(self, arguments: argparse.Namespace, data: Data, model: nn.Module) -> None:
        self.arguments, self.data, self.model = arguments, data, model
        self.number = int(os.environ["RANK"] if arguments.ddp else os.environ.get(WORKER, "0"))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=arguments.rate, momentum=0.9, weight_decay=5e-4)
        self._crops = augmentation.Crops(data)
        self._chance = torch.Generator().manual_seed(SEED + self.number)
        self._copies: list[tuple[float, dict[str, torch.Tensor]]] = []
        self._began = self._seconds = 0.0
        self._samples = self._steps = 0
        self._compute_seconds = self._time_computing()

    def over_ddp(self) -> None:
        """Train as one rank of DDP over gloo."""
        torch.distributed.init_process_group("gloo")
        workers = int(os.environ["WORLD_SIZE"])
        paced = nn.parallel.DistributedDataParallel(self.model, bucket_cap_mb=self.arguments.bucket)
        chance, batch = torch.Generator().manual_seed(SEED), self.arguments.batch

        def batches() -> Iterator[torch.Tensor]:
            for _ in range(self.arguments.epochs):
                order = torch.randperm(len(self.data.labels), generator=chance)
                for start in range(0, len(order) - workers * batch + 1, workers * batch):
                    yield order[start + self.number * batch : start + (self.number + 1) * batch]

        self._train(batches(), paced, workers)
        self._write_result()
        torch.distributed.barrier()  # a rank that leaves first can make gloo's destructor hang on the others
        del paced
        torch.distributed.destroy_process_group()

    def over_paceline(self) -> None:
        """Train as one worker of a job, or alone."""
        dataset = TensorDataset(torch.arange(len(self.data.labels)))
        with paceline.join(self.model, self.optimizer, overlap=self.arguments.overlap) as session:
            workers = int(os.environ.get("PACELINE_WORKERS", "1"))
            batches = session.batches(dataset, self.arguments.batch, self.arguments.epochs, SEED)
            self._train((numbers for (numbers,) in batches), self.model, workers, session)
            session.finish()  # wait for the others: the lab ends when the last worker has left
            self._write_result()

    def _train(
        self,
        batches: Iterator[torch.Tensor],
        model: nn.Module,
        workers: int,
        session: paceline.Session | None = None,
    ) -> None:
        per_epoch = len(self.data.labels) / (workers * self.arguments.batch)  # steps of one worker
        between = max(1.0, per_epoch / self.arguments.copies)  # steps between two copies
        steps = max(1.0, per_epoch * self.arguments.epochs)
        for numbers in batches:
            begin = time.perf_counter()
            self._began = self._began or begin
            progress = min(1.0, self._steps / steps)
            for group in self.optimizer.param_groups:
                group["lr"] = self.arguments.rate * min(
                    (progress + 1 / steps) / WARM_UP, (1 - progress) / (1 - WARM_UP)
                )
            loss = self._loss(model, numbers)
            if self.number == 0:
                time.sleep(self.arguments.delay)  # before gradients are sent, as on a slower machine
            loss.backward()  # type: ignore[no-untyped-call]
            if session:
                session.step(loss)
            else:
                self.optimizer.step()
                self.optimizer.zero_grad()
            self._note(len(numbers), between)
            if self._steps == self.arguments.steps:
                break

    def _loss(self, model: nn.Module, numbers: torch.Tensor) -> torch.Tensor:
        variants = augmentation.draw(numbers, self._chance).to(self.data.labels.device, non_blocking=True)
        images = self.data.prepared(self._crops.images(variants))
        kind = self.data.labels.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            output = model(images)
        return networks.loss(output.float(), self.data.labels[augmentation.samples_of(variants)])

    def _time_computing(self) -> float:
        """Return the time of a step without any network, while the other workers compute too. Nothing is learned."""
        numbers = torch.arange(min(self.arguments.batch, len(self.data.labels)))
        times = []
        for _ in range(TIMED_STEPS):
            begin = time.perf_counter()
            self._loss(self.model, numbers).backward()  # type: ignore[no-untyped-call]
            self.optimizer.zero_grad()
            self._finish_computing()
            times.append(time.perf_counter() - begin)
        return sorted(times)[len(times) // 2]

    def _finish_computing(self) -> None:
        if self.data.labels.is_cuda:
            torch.cuda.synchronize()

    def _note(self, samples: int, between: float) -> None:
        self._steps += 1
        self._samples += samples
        if self.number == 0 and len(self._copies) < self._steps // between:
            self._finish_computing()
            weights = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
            self._copies.append((time.perf_counter() - self._began, weights))
        self._seconds = time.perf_counter() - self._began

    def _write_result(self) -> None:
        """Test the copies, and write the file."""
        if self.number or not self.arguments.result:
            return
        found = []
        for seconds, weights in self._copies:
            self.model.load_state_dict(weights)
            found.append([round(seconds, 3), round(self._accuracy(), 4)])
        result = {
            "tests": found,
            "samples_per_second": self._samples / self._seconds,
            "steps": self._steps,
            "compute_seconds": self._compute_seconds,
        }
        self.arguments.result.write_text(json.dumps(result))

    def _accuracy(self) -> float:
        self.model.eval()
        inputs, labels, correct = self.data.test_inputs, self.data.test_labels, 0
        with torch.no_grad():
            for start in range(0, len(labels), TESTED):
                output = self.model(self.data.prepared(inputs[start : start + TESTED]))
                correct += int((output.argmax(1) == labels[start : start + TESTED]).sum())
        self.model.train()
        return correct / len(labels)


if __name__ == "__main__":
    main()
