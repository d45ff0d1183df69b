"""A small network on handwritten digits, in numpy. Each node has its own share of the data, with skewed labels."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from paceline.workloads import digits

Weights: TypeAlias = dict[str, np.ndarray[Any, Any]]
CLASSES, HIDDEN, PIXELS = 10, 64, 64
ALPHA = 0.5  # of the Dirichlet distribution of each node's labels; a small one means few labels


def initial_weights(seed: int) -> Weights:
    chance = np.random.default_rng(seed)
    return {
        "hidden.weight": chance.normal(0, np.sqrt(2 / PIXELS), (PIXELS, HIDDEN)).astype(np.float32),
        "hidden.bias": np.zeros(HIDDEN, np.float32),
        "output.weight": chance.normal(0, np.sqrt(1 / HIDDEN), (HIDDEN, CLASSES)).astype(np.float32),
        "output.bias": np.zeros(CLASSES, np.float32),
    }


def test_data() -> tuple[Any, Any]:
    _, _, images, labels = digits.load()
    return _pixels(images), np.asarray(labels)


def data_of(node: int, nodes: int, seed: int) -> tuple[Any, Any]:
    """Return the images and labels of one of so many nodes. seed: of the partition."""
    images, labels, _, _ = digits.load()
    images, labels = _pixels(images), np.asarray(labels)
    chance = np.random.default_rng(seed)
    shares = chance.dirichlet([ALPHA] * nodes, CLASSES)  # of each label, by node
    mine = []
    for label in range(CLASSES):
        samples = chance.permutation(np.flatnonzero(labels == label))
        ends = np.round(np.cumsum(shares[label]) * len(samples)).astype(int)
        mine.append(samples[ends[node - 1] if node else 0 : ends[node]])
    numbers = np.concatenate(mine)
    return images[numbers], labels[numbers]


def train(
    weights: Weights, images: Any, labels: Any, steps: int, rate: float, seed: list[int]
) -> tuple[Weights, float]:
    """Train by steps of SGD. Return the new weights and the mean loss."""
    weights = {name: array.copy() for name, array in weights.items()}
    chance, losses = np.random.default_rng(seed), []
    for _ in range(steps):
        batch = chance.integers(0, len(labels), min(32, len(labels)))
        loss, gradients = _gradients(weights, images[batch], labels[batch])
        losses.append(loss)
        for name, gradient in gradients.items():
            weights[name] -= rate * gradient.astype(np.float32)
    return weights, float(np.mean(losses))


def accuracy(weights: Weights, images: Any, labels: Any) -> float:
    return float((_outputs(weights, images)[1].argmax(1) == labels).mean())


def _outputs(weights: Weights, images: Any) -> tuple[Any, Any]:
    hidden = np.maximum(0, images @ weights["hidden.weight"] + weights["hidden.bias"])
    return hidden, hidden @ weights["output.weight"] + weights["output.bias"]


def _gradients(weights: Weights, images: Any, labels: Any) -> tuple[float, Weights]:
    hidden, outputs = _outputs(weights, images)
    odds = np.exp(outputs - outputs.max(1, keepdims=True))
    odds /= odds.sum(1, keepdims=True)
    loss = -np.log(odds[np.arange(len(labels)), labels] + 1e-12).mean()
    odds[np.arange(len(labels)), labels] -= 1
    odds /= len(labels)
    back = (odds @ weights["output.weight"].T) * (hidden > 0)
    return float(loss), {
        "hidden.weight": images.T @ back,
        "hidden.bias": back.sum(0),
        "output.weight": hidden.T @ odds,
        "output.bias": odds.sum(0),
    }


def _pixels(images: Any) -> Any:
    return np.asarray(images, np.float32).reshape(len(images), -1) / 255
