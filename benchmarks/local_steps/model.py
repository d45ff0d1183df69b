"""A GPT whose tensors have a first dimension for the workers: one call computes the losses of all workers."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.local_steps.size import VOCABULARY, Size


def shapes(size: Size) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters. Parameters with one dimension are gains and have no weight decay."""
    width = size.width
    found: dict[str, tuple[int, ...]] = {"token": (VOCABULARY, width), "position": (size.context, width)}
    for layer in range(size.layers):
        found[f"{layer}.attention_gain"] = (width,)
        found[f"{layer}.attention"] = (width, 3 * width)
        found[f"{layer}.attended"] = (width, width)
        found[f"{layer}.hidden_gain"] = (width,)
        found[f"{layer}.hidden"] = (width, 4 * width)
        found[f"{layer}.output"] = (4 * width, width)
    return found | {"gain": (width,), "head": (width, VOCABULARY)}


def elements(size: Size) -> int:
    """Return the number of a model's parameters."""
    return sum(math.prod(shape) for shape in shapes(size).values())


def views(flat: Tensor, size: Size) -> dict[str, Tensor]:
    """Return the parameters of flat models, [workers, elements], as [workers, *shape]."""
    wanted = shapes(size)
    parts = torch.split(flat, [math.prod(shape) for shape in wanted.values()], dim=1)
    return {name: part.view(len(flat), *wanted[name]) for name, part in zip(wanted, parts, strict=True)}


def new_model(size: Size, seed: int) -> Tensor:
    """Return the first weights of a model, flat."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for name, shape in shapes(size).items():
        if len(shape) == 1:
            parts.append(torch.ones(shape))
            continue
        residual = name.endswith((".attended", ".output"))  # each layer adds these two to the residual stream
        deviation = 0.02 / math.sqrt(2 * size.layers) if residual else 0.02
        parts.append(deviation * torch.randn(shape, generator=generator).flatten())
    return torch.cat(parts)


def losses(flat: Tensor, corpus: Tensor, starts: Tensor, size: Size) -> Tensor:
    """Return the mean loss of each worker's model on its own sequences. starts: [workers, batch], places in corpus."""
    workers, batch = starts.shape
    length, width, heads = size.context, size.width, size.heads
    weights = views(flat, size)
    tokens = corpus[starts[..., None] + torch.arange(length + 1, device=starts.device)].long()
    inputs, targets = tokens[..., :-1].reshape(workers, -1), tokens[..., 1:].reshape(-1)
    one_hot = (inputs[..., None] == torch.arange(VOCABULARY, device=starts.device)).to(flat.dtype)  # faster than lookup
    x = torch.bmm(one_hot, weights["token"]).view(workers, batch, length, width)
    x = (x + weights["position"][:, None]).view(workers, -1, width)

    def normalized(values: Tensor, gain: Tensor) -> Tensor:
        return functional.layer_norm(values, (width,)) * gain[:, None]

    for layer in range(size.layers):
        both = torch.bmm(normalized(x, weights[f"{layer}.attention_gain"]), weights[f"{layer}.attention"])
        query, key, value = both.view(workers * batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + torch.bmm(seen.transpose(1, 2).reshape(workers, -1, width), weights[f"{layer}.attended"])
        hidden = torch.bmm(normalized(x, weights[f"{layer}.hidden_gain"]), weights[f"{layer}.hidden"])
        x = x + torch.bmm(functional.gelu(hidden, approximate="tanh"), weights[f"{layer}.output"])
    logits = torch.bmm(normalized(x, weights["gain"]), weights["head"]).view(-1, VOCABULARY)
    each = functional.cross_entropy(logits.float(), targets, reduction="none")
    return each.view(workers, -1).mean(1)
