"""The federated trainings behind fig. 15 and table IV."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from paceline.reproduce.fl_r2sp.schemes import BSP, CORE, SCHEMES
from paceline.reproduce.shared.federation import Federated, Federation
from paceline.reproduce.shared.request import Request

#: The α with which an outlier has more than 97% of its samples of one class, as the paper says its outliers have. The
#: paper states an α of 0.1. If that is the α of each class, the share of the largest class is 66% on average.
ONE_CLASS = 0.01

MODELS_OF_THE_PAPER = "The paper's models (a CNN and ResNet20 on CIFAR-10, an LSTM on Speech Commands)"
NO_SPEECH = "Keyword spotting was not trained, because Google's Speech Commands was not found."

BySeed: TypeAlias = dict[int, Federated]


@dataclass(frozen=True)
class FederatedCase:
    """A model and the data that it learns."""

    name: str
    template: Federation  # everything except the policy and the seed
    note: str = ""
    core: bool = False  # trained only under the paper's schemes
    max_seeds: int = 3

    @property
    def title(self) -> str:
        return f"{self.name} ({self.note})" if self.note else self.name

    @property
    def schemes(self) -> dict[str, str]:
        return {name: policy for name, policy in SCHEMES.items() if policy in CORE or not self.core}


def cases(request: Request) -> tuple[list[FederatedCase], list[str]]:
    """Return the cases to train, and a sentence for each that cannot be trained as in the paper."""
    if request.quick or request.lacks_cifar:
        why = "--quick" if request.quick else request.lacks_cifar
        template = Federation("fl-cnn", BSP, "mlp", "digits", 14, 10, rate=0.02, samples=64, every=1)
        return [FederatedCase("CNN", template, "an MLP on digits")], [
            f"{MODELS_OF_THE_PAPER} were not trained ({why})."
        ]
    found = [
        FederatedCase("CNN", Federation("fl-cnn", BSP, "cnn", "cifar10", 120, 100, every=2)),
        FederatedCase(
            "CNN", Federation("fl-cnn", BSP, "cnn", "cifar10", 120, 100, odd=ONE_CLASS, every=2), "97% one class", True
        ),
    ]
    missing = []
    if not request.lacks("speech"):
        found.append(FederatedCase("LSTM", Federation("fl-lstm", BSP, "lstm", "speech", 80, 100, rate=0.05, every=2)))
    elif not (lacks := request.lacks("fashion-mnist")):
        missing.append(f"{NO_SPEECH} Instead, the LSTM reads the images of Fashion-MNIST by rows.")
        template = Federation("fl-lstm", BSP, "lstm", "fashion-mnist", 80, 100, rate=0.05, every=2)
        found.append(FederatedCase("LSTM", template, "Fashion-MNIST by rows"))
    else:
        missing.append(f"{NO_SPEECH} The LSTM was not trained at all ({lacks}).")
    return found, missing


def resnet20_case(request: Request) -> tuple[FederatedCase | None, str]:
    """Return the case of ResNet20, and why it cannot be trained, or how it differs from the CNN's.

    A sample takes 25 times as many products as the CNN's, so there are fewer rounds and smaller batches.
    """
    if request.quick:
        return None, "ResNet20 was not trained (--quick)."
    if request.where != "gpu":
        return None, "ResNet20 was not trained. It needs a GPU (--device cuda)."
    if request.lacks_cifar:
        return None, f"ResNet20 was not trained ({request.lacks_cifar})."
    template = Federation(
        "fl-resnet20", BSP, "resnet20", "cifar10", 32, 100, batch=8, every=1, precision=request.precision
    )
    note = "ResNet20: one seed, 32 rounds, local batches of 8, in bfloat16, under the paper's schemes without ASP."
    return FederatedCase("ResNet20", template, core=True, max_seeds=1), note


def trained(request: Request, case: FederatedCase, policies: Iterable[str]) -> dict[str, BySeed]:
    """Train a case under each policy. Return the results by policy and seed, without those that did not run."""
    seeds = request.seeds[: case.max_seeds]
    wanted = {
        policy: {seed: msgspec.structs.replace(case.template, policy=policy, seed=seed) for seed in seeds}
        for policy in policies
    }
    found = request.runs.federated(run for runs in wanted.values() for run in runs.values())
    done = {policy: {seed: found[run] for seed, run in runs.items() if run in found} for policy, runs in wanted.items()}
    return {policy: runs for policy, runs in done.items() if runs}


def paired(found: dict[str, BySeed], *policies: str) -> list[list[Federated]]:
    """Return the results of each policy for the seeds that all of them have; an empty list if there are none."""
    both = [found.get(policy, {}) for policy in policies]
    seeds = sorted(set.intersection(*(set(runs) for runs in both)))
    return [[runs[seed] for seed in seeds] for runs in both] if seeds else []
