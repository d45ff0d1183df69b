"""A small network in numpy, the same as that of `train.lessons`, and workers that train it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import paceline.arrays as arrays

Params = dict[str, Any]
#: The weights of torch's Sequential(Linear, Tanh, Linear), by their names there and in the same order.
SHAPES = {"0.weight": (8, 6), "0.bias": (8,), "2.weight": (3, 8), "2.bias": (3,)}


def params(seed: int = 0) -> Params:
    random = np.random.default_rng(seed)
    return {name: (0.3 * random.standard_normal(shape)).astype(np.float32) for name, shape in SHAPES.items()}


def data(samples: int) -> tuple[Any, Any]:
    random = np.random.default_rng(1)
    return random.standard_normal((samples, 6)).astype(np.float32), random.integers(0, 3, samples)


def value_and_grad(weights: Params, x: Any, y: Any) -> tuple[float, Params]:
    """Return the mean cross entropy of the network, and its gradients."""
    hidden = np.tanh(x @ weights["0.weight"].T + weights["0.bias"])
    scores = hidden @ weights["2.weight"].T + weights["2.bias"]
    chances = np.exp(scores - scores.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    loss = -np.log(chances[np.arange(len(y)), y]).mean()
    errors = chances.copy()
    errors[np.arange(len(y)), y] -= 1
    errors /= len(y)
    inner = errors @ weights["2.weight"] * (1 - hidden**2)
    gradients = {
        "0.weight": inner.T @ x,
        "0.bias": inner.sum(0),
        "2.weight": errors.T @ hidden,
        "2.bias": errors.sum(0),
    }
    return float(loss), {name: value.astype(np.float32) for name, value in gradients.items()}


def flat(weights: Params) -> Any:
    return np.concatenate([np.asarray(weights[name]).reshape(-1) for name in SHAPES])


def student(optimizer: str, x: Any, y: Any, steps: int, **options: Any) -> Callable[[str], Any]:
    """Return a worker that makes `steps` steps on these samples and returns its weights."""

    def run(address: str | None) -> Any:
        with arrays.join(params(), optimizer, connect=address, **options) as session:
            for _ in range(steps):
                loss, gradients = value_and_grad(session.params, x, y)
                session.step(gradients, loss, batch_size=len(x))
            session.finish()
            return flat(session.params)

    return run


def alone(optimizer: str, x: Any, y: Any, steps: int) -> Any:
    """Return the weights after `steps` steps of plain torch on all samples."""
    import torch

    from paceline.model.optimizer import make
    from paceline.model.optimizer_text import parse

    mine = [torch.from_numpy(value.copy()).requires_grad_() for value in params().values()]
    plain = make(parse(optimizer), [mine])
    for _ in range(steps):
        hidden = torch.tanh(torch.from_numpy(x) @ mine[0].T + mine[1])
        loss: Any = torch.nn.functional.cross_entropy(hidden @ mine[2].T + mine[3], torch.from_numpy(y))
        loss.backward()
        plain.step()
        plain.zero_grad()
    return torch.cat([each.detach().flatten() for each in mine]).numpy()
