"""Train the digits of `digits.py` on Ray: on this machine, or on the cluster that RAY_ADDRESS names.

python examples/ray_digits.py                              # four workers, first under BSP and then under R²SP
python examples/ray_digits.py --workers 2 --policies r2sp --servers 2
python examples/ray_digits.py --tune                       # four trials: two policies, two learning rates
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.ray import PacelineTrainer
from paceline.workloads.data import load


def make_model() -> torch.nn.Module:
    """Return the model of `digits.py`: 273,000 parameters, so an update is about 1 MB."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 10),
    )


def accuracy(model: torch.nn.Module) -> float:
    """Return the share of the test set that the model recognizes."""
    digits = load("digits")
    model.eval()
    with torch.no_grad():
        predicted = model(digits.test_inputs / 255).argmax(1)
    model.train()
    return (predicted == digits.test_labels).float().mean().item()


def train(config: dict[str, Any]) -> None:
    """Train on one worker. This is the loop of `digits.py`, as it is under `paceline run`."""
    torch.manual_seed(0)
    digits = load("digits")
    training = TensorDataset(digits.inputs / 255, digits.labels)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    with paceline.join(model, optimizer) as session:
        for x, y in session.batches(training, config["batch_size"], config["epochs"]):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            session.step(loss)
        session.finish()  # wait for the other workers, and pull the final model
        if session.is_main:
            session.log(accuracy=accuracy(model))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--policies", default="bsp,r2sp")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--storage", type=Path, default=Path.home() / "ray_results", help="a folder that nodes share")
    parser.add_argument("--tune", action="store_true", help="try two policies and two learning rates")
    arguments = parser.parse_args()
    # On a laptop, Ray may start as many workers as it is told to, however many cores there are.
    ray.init(log_to_driver=False, **({} if "RAY_ADDRESS" in os.environ else {"num_cpus": 4 * arguments.workers}))
    loop = {"lr": arguments.lr, "batch_size": arguments.batch_size, "epochs": arguments.epochs}

    def trainer(policy: str, config: dict[str, Any]) -> PacelineTrainer:
        return PacelineTrainer(
            train,
            train_loop_config=config,
            policy=policy,
            servers=arguments.servers,
            scaling_config=ScalingConfig(num_workers=arguments.workers),
            run_config=RunConfig(storage_path=arguments.storage, failure_config=FailureConfig(max_failures=3)),
        )

    if arguments.tune:
        search(trainer, loop, arguments.storage)
        return
    for policy in arguments.policies.split(","):
        result = trainer(policy, loop).fit()
        figures = result.metrics
        print(
            f"{policy}: accuracy {figures['accuracy']:.1%}, {figures['samples_per_second']:.0f} samples/s, "
            f"{1000 * figures['iteration_seconds']:.1f} ms an iteration, staleness {figures['mean_staleness']:.1f}; "
            f"the model is in {result.checkpoint.path}"
        )


def search(make_trainer: Any, loop: dict[str, Any], storage: Path) -> None:
    """Try policies and learning rates with Ray Tune, and load the best model into plain PyTorch."""

    def trial(config: dict[str, Any]) -> None:
        result = make_trainer(config["policy"], {**loop, "lr": config["lr"]}).fit()
        tune.report(result.metrics, checkpoint=result.checkpoint)

    space = {"policy": tune.grid_search(["bsp", "r2sp"]), "lr": tune.grid_search([0.01, 0.05])}
    grid = tune.Tuner(
        tune.with_resources(trial, {"memory": 1 << 26}),  # the workers of a trial reserve their own cores
        param_space=space,
        run_config=tune.RunConfig(storage_path=str(storage), verbose=0),
    ).fit()
    for each in grid:
        print(f"{each.config['policy']}, rate {each.config['lr']}: accuracy {each.metrics['accuracy']:.1%}")
    best = grid.get_best_result("accuracy", "max")
    model = make_model()
    with best.checkpoint.as_directory() as folder:
        model.load_state_dict(torch.load(Path(folder) / "model.pt"))
    print(
        f"The best is {best.config['policy']} with rate {best.config['lr']}. Its checkpoint {best.checkpoint.path} "
        f"has an accuracy of {accuracy(model):.1%} in plain PyTorch."
    )


if __name__ == "__main__":
    main()
