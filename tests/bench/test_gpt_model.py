"""The stacked models of `benchmarks/gpt.py` train as separate models do in plain PyTorch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from benchmarks.local_steps.adamw import BETAS, DECAY, EPSILON, LARGEST_NORM, adamw, step_settings
from benchmarks.local_steps.arms import arm_of
from benchmarks.local_steps.data import Data, python_sources, sample_starts
from benchmarks.local_steps.model import new_model
from benchmarks.local_steps.size import SIZES, VOCABULARY, WORKERS, Size
from benchmarks.local_steps.training import Training, machine
from torch import Tensor, nn
from torch.nn import functional

TINY = SIZES["tiny"]


class Block(nn.Module):
    """A layer of a GPT."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.attention_norm = nn.LayerNorm(size.width, bias=False)
        self.attention = nn.Linear(size.width, 3 * size.width, bias=False)
        self.attended = nn.Linear(size.width, size.width, bias=False)
        self.hidden_norm = nn.LayerNorm(size.width, bias=False)
        self.hidden = nn.Linear(size.width, 4 * size.width, bias=False)
        self.output = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.size.heads, width // self.size.heads)
        query, key, value = (
            each.reshape(shape).transpose(1, 2) for each in self.attention(self.attention_norm(x)).chunk(3, dim=2)
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(shape[3])
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        seen = scores.masked_fill(later, -math.inf).softmax(3) @ value
        x = x + self.attended(seen.transpose(1, 2).reshape(batch, length, width))
        found: Tensor = x + self.output(functional.gelu(self.hidden(self.hidden_norm(x)), approximate="tanh"))
        return found


class Separate(nn.Module):
    """One worker's model in plain PyTorch."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, bias=False)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens[:, :-1]) + self.position.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def oriented(self) -> list[Tensor]:
        """Return the parameters in the orientation of a flat model: the weights of linear layers are transposed."""
        linear = {id(each.weight) for each in self.modules() if isinstance(each, nn.Linear)}
        return [each.data.T if id(each) in linear else each.data for each in self.parameters()]

    def set(self, flat: Tensor) -> None:
        parts = torch.split(flat, [each.numel() for each in self.oriented()])
        for ours, theirs in zip(self.oriented(), parts, strict=True):
            ours.copy_(theirs.view(ours.shape))

    def flat(self) -> Tensor:
        return torch.cat([each.flatten() for each in self.oriented()])


@pytest.fixture(scope="module")
def data() -> Data:
    return python_sources(Path(__file__).parents[2] / "src")


def synchronous(size: Size, data: Data) -> Training:
    return Training(data, arm_of("sync", size), 1.0, "float32", 0, machine("cpu", compiled=False))


def separately(size: Size, data: Data, steps: int) -> Tensor:
    """Train in plain PyTorch, and return the workers' models. They average after every round of local steps."""
    first, starts = new_model(size, 0), sample_starts(size, 0, len(data.training))
    models = [Separate(size) for _ in range(WORKERS)]
    optimizers = []
    for model in models:
        model.set(first)
        groups = [
            {"params": [each for each in model.parameters() if (each.dim() > 1) == decays], "weight_decay": decay}
            for decays, decay in ((True, DECAY), (False, 0.0))
        ]
        optimizers.append(torch.optim.AdamW(groups, betas=BETAS, eps=EPSILON))
    for step, (rate, *_) in enumerate(step_settings(size)[:steps]):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for group in optimizer.param_groups:
                group["lr"] = float(rate)
            sequences = [data.training[start : start + size.context + 1] for start in starts[step, worker]]
            optimizer.zero_grad()
            model(torch.from_numpy(np.stack(sequences).astype(np.int64))).backward()
            nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
            optimizer.step()
        if (step + 1) % size.local_steps == 0:
            mean = torch.stack([model.flat() for model in models]).mean(0)
            for model in models:
                model.set(mean)
    return torch.stack([model.flat() for model in models])


def test_stacked_workers_train_as_separate_models_do(data: Data) -> None:
    size = replace(TINY, layers=2)
    ours = synchronous(size, data)
    for at in range(5):
        ours.step(at)
    theirs, first = separately(size, data, 5), new_model(size, 0)
    assert (theirs - first).norm() > 0.1
    assert (theirs[0] - theirs[1]).norm() > 0.1, "the workers have different samples"
    assert (ours.models - theirs).norm() < 1e-3 * (theirs - first).norm()


def test_the_synchronous_arm_averages(data: Data) -> None:
    ours = synchronous(TINY, data)
    found = ours.run()
    theirs, first = separately(TINY, data, TINY.rounds * TINY.local_steps)[0], new_model(TINY, 0)
    assert (ours.server.weights - theirs).norm() < 1e-3 * (theirs - first).norm()
    assert found["curve"][0][1] > found["loss"] + 0.1, "it has learned"
    assert found["end_points"] == pytest.approx(found["loss"], abs=1e-4)


def test_adamw_is_that_of_torch() -> None:
    """Two workers with rates of their own, decay for half of the elements, and gradients that are clipped or not."""
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(2, 6, generator=generator)
    theirs = [[row[:3].clone().requires_grad_(), row[3:].clone().requires_grad_()] for row in flat]
    optimizers = [
        torch.optim.AdamW([{"params": [a], "weight_decay": DECAY}, {"params": [b], "weight_decay": 0.0}], betas=BETAS)
        for a, b in theirs
    ]
    copy, first, second = torch.zeros_like(flat, dtype=torch.bfloat16), torch.zeros_like(flat), torch.zeros_like(flat)
    decays = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    for step in range(1, 6):
        gradient = torch.randn(2, 6, generator=generator) * (0.1 if step % 2 else 10)
        settings = torch.tensor(
            [[rate, 1 / (1 - BETAS[0] ** step), 1 / (1 - BETAS[1] ** step)] for rate in (0.01 * step, 0.1)]
        )
        adamw(flat, copy, gradient, first, second, decays, settings)
        for worker, (optimizer, parameters) in enumerate(zip(optimizers, theirs, strict=True)):
            parameters[0].grad, parameters[1].grad = gradient[worker, :3].clone(), gradient[worker, 3:].clone()
            nn.utils.clip_grad_norm_(parameters, LARGEST_NORM)
            for group in optimizer.param_groups:
                group["lr"] = float(settings[worker, 0])
            optimizer.step()
    expected = torch.stack([torch.cat(parameters).detach() for parameters in theirs])
    assert torch.allclose(flat, expected, atol=1e-6)
    assert torch.equal(copy, flat.to(torch.bfloat16))


def test_a_waiting_worker_does_not_change() -> None:
    flat, first, second = torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3)
    settings = torch.tensor([[0.0, 1.0, 1.0], [0.1, 1.0, 1.0]])
    adamw(flat, torch.zeros(2, 3), torch.full((2, 3), 0.1), first, second, torch.ones(3), settings)
    for each in (flat, first, second):
        assert torch.equal(each[0], torch.ones(3))
        assert not torch.equal(each[1], torch.ones(3))


def test_the_rate_warms_up_and_falls_to_a_tenth() -> None:
    size = replace(TINY, local_steps=50, warm_up=10)
    rates = step_settings(size)[:, 0]
    assert rates[:10] == pytest.approx([size.rate * done / 10 for done in range(1, 11)])
    assert rates[-1] == pytest.approx(size.rate / 10)
    assert (np.diff(rates[9:]) < 0).all()
