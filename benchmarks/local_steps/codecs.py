"""The codecs of `paceline.model.codecs` in torch, for a GPU: the numbers that a receiver decodes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.model.encodings import SMALLEST

EXACT = "float32"


def decoded(values: Tensor, codec: str) -> Tensor:
    """Return the numbers that a receiver decodes if these numbers, [workers, elements], are encoded.

    `int8` and `int4` give the numbers of `paceline.model.codecs`, bit for bit. With `topk` the two magnitudes of a
    block may be rounded to a neighbour, because their sums are made in another order.
    """
    if codec == EXACT:
        return values
    kind, _, fraction = codec.partition(":")
    block = {"int8": 256, "int4": 64, "topk": 4096}[kind]
    full = values.shape[1] - values.shape[1] % block
    found = torch.empty_like(values)
    for start, stop, width in ((0, full, block), (full, values.shape[1], values.shape[1] - full)):
        if stop > start:
            blocks = values[:, start:stop].reshape(-1, width)
            coded = _largest(blocks, float(fraction)) if kind == "topk" else _integers(blocks, int(kind[3:]))
            found[:, start:stop] = coded.view(len(values), -1)
    return found


def _integers(blocks: Tensor, bits: int) -> Tensor:
    largest = (1 << (bits - 1)) - 1
    scale = _rounded_up(blocks.abs().amax(1, keepdim=True) * (1 / largest))
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return (blocks * inverse).round() * scale


def _largest(blocks: Tensor, fraction: float) -> Tensor:
    width = blocks.shape[1]
    kept = max(1, min(width, math.ceil(fraction * width)))
    sizes, places = blocks.abs().topk(kept, dim=1)
    is_high = sizes > sizes.mean(1, keepdim=True)
    high_count, high_sum = is_high.sum(1, keepdim=True), torch.where(is_high, sizes, 0.0).sum(1, keepdim=True)
    low = (sizes.sum(1, keepdim=True) - high_sum) / (kept - high_count).clamp(min=1)
    high = high_sum / high_count.clamp(min=1)
    sent = torch.where(is_high, _rounded_up(high), _rounded_up(low))
    return torch.zeros_like(blocks).scatter_(1, places, torch.copysign(sent, blocks.gather(1, places)))


def _rounded_up(scales: Tensor) -> Tensor:
    """Return scales rounded up to bfloat16."""
    small = torch.where(scales < float(SMALLEST), 0.0, scales)
    return ((small.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
