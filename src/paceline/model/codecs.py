"""Small encodings of an update: fewer bits for each number, or only the largest numbers. Needs no torch.

- `int8`, `int4`: the numbers of a block share a scale, and each is a multiple of it.
- `topk:F`: of each block, the fraction F with the largest magnitudes is sent: a position, a sign, and one of two
  magnitudes. All other numbers are decoded as 0.
- `int4/P`, `int8/P`, `float32/P`: one of P parts of the numbers is sent in each update, and the next part in the next
  one. All other numbers are decoded as 0.

What an encoding leaves out is not lost if the sender adds it to its next update (`Encoder`). The number of bytes
follows from the number of elements alone. If a number of a block is not finite, at least one of its decoded numbers is
not finite.
"""

from __future__ import annotations

import math
from copy import copy
from functools import lru_cache
from typing import Any

import numpy as np

from paceline.model.encodings import Codec, Floats, Integers, TopK
from paceline.model.half_precision import WIDTH, widen
from paceline.model.one_part import LARGEST, Exact, OnePart

KEPT = 0.5  # the share of what is left that is added to the next update of local steps, if that has few numbers
NAMES = "int8, int4, topk:F such as topk:0.02, or a part at a time such as int4/4"


@lru_cache(maxsize=64)
def codec(name: str) -> Codec:
    """Return a codec by its name. Raise ValueError with one sentence if there is none."""
    inner, slash, parts = name.partition("/")
    if slash:
        if inner not in ("int8", "int4", "float32") or not parts.isdecimal() or not 2 <= int(parts) <= LARGEST:
            raise ValueError(
                f"to send one part at a time, name int8, int4 or float32, and 2 to {LARGEST} parts, such as int4/4, "
                f"not {name!r:.40}"
            )
        return OnePart(Exact() if inner == "float32" else codec(inner), int(parts))
    if name == "int8":
        return Integers(8, block=256)
    if name == "int4":
        return Integers(4, block=64)
    kind, _, number = name.partition(":")
    if kind == "topk":
        try:
            fraction = float(number)
        except ValueError:
            fraction = math.nan
        if 1e-4 <= fraction <= 1:
            return TopK(fraction)
        raise ValueError(
            f"topk needs the fraction of the numbers to send, from 0.0001 to 1, such as topk:0.02, not {name!r:.40}"
        )
    raise ValueError(f"updates are encoded as {NAMES}, not as {name!r:.40}")


def encoded_size(dtype: str, elements: int, unencoded: int = 0) -> int:
    """Return the bytes of a body. dtype: an element type or a codec. Raise ValueError if it is neither.

    unencoded: more elements, behind the others, that a codec leaves in float32: running statistics are values, and what
    is left out of a value cannot be added to the next one.
    """
    if dtype in WIDTH:
        return (elements + unencoded) * WIDTH[dtype]
    return codec(dtype).size(elements) + unencoded * WIDTH["float32"]


def decode(source: Any, dtype: str, into: Floats, unencoded: int = 0) -> None:
    """Decode a body into an existing array. Raise ValueError if its size is wrong. unencoded: as in `encoded_size`."""
    if dtype in WIDTH:
        widen(source, dtype, into)
        return
    body = np.frombuffer(source, np.uint8)
    trained = into.size - unencoded
    if body.size != (due := encoded_size(dtype, trained, unencoded)):
        raise ValueError(f"{into.size} elements of {dtype} are {due} bytes, not {body.size}")
    border = codec(dtype).size(trained)
    codec(dtype).decode(body[:border], into[:trained])
    widen(body[border:], "float32", into[trained:])


class Encoder:
    """Encodes the updates of one worker. What the code of an update leaves out is added to the next one.

    So the decoded updates, and what is left at the end, sum to the updates. This is error feedback (Seide et al., 2014;
    Karimireddy et al., 2019).

    With local steps and `topk`, only a half of it is added, and that sum does not hold. The worker begins each round
    without the steps that it has not sent. So it makes most of them again, and would send them several times
    (SparseLoCo: Sarfi et al., 2025).
    """

    def __init__(self, name: str, elements: int, local_steps: bool = False) -> None:
        """elements: of the whole model, without its running statistics, which are not encoded.

        local_steps: whether an update is the difference that several steps have made.
        """
        self.codec = codec(name)
        self.left = np.zeros(elements, np.float32)
        self._kept = KEPT if local_steps and self.codec.is_sparse else 1.0

    def whole(self) -> Encoder:
        """Return an encoder that sends all parts at once. What is left is the same array for both."""
        found = copy(self)
        found.codec = self.codec.whole
        return found

    def size(self, start: int, stop: int) -> int:
        """Return the bytes in which the elements from `start` to `stop` are encoded."""
        trained = min(stop, max(start, self.left.size)) - start
        return encoded_size(self.codec.name, trained, stop - start - trained)

    def encode(self, update: memoryview, dtype: str, start: int, stop: int, turn: int = 0) -> memoryview:
        """Encode the elements from `start` to `stop` of an update of element type `dtype`. Call this once for each.

        turn: the number of the update. A codec that sends one part at a time chooses the part by it.
        """
        left, values = self.left[start:stop], _values(update, dtype, start, stop)
        if self._kept != 1:
            left *= self._kept
        body = np.empty(self.size(start, stop), np.uint8)
        border = self.codec.size(left.size)
        self.codec.encode(values[: left.size], body[:border], left, turn)
        body[border:] = values[left.size :].view(np.uint8)
        return body.data

    def take_back(self, update: memoryview, dtype: str, start: int, stop: int, body: memoryview) -> None:
        """Undo `encode`, which returned `body`: this update is not applied, and its samples are trained on again.

        What an earlier update left out may have travelled with it, and must be sent again.
        """
        left = self.left[start:stop]
        decoded = np.empty(left.size, np.float32)
        self.codec.decode(np.frombuffer(body, np.uint8)[: self.codec.size(left.size)], decoded)
        if np.isfinite(decoded).all():
            left += decoded
            left -= _values(update, dtype, start, stop)[: left.size]
            left /= self._kept


def _values(update: memoryview, dtype: str, start: int, stop: int) -> Floats:
    """Return the elements from `start` to `stop` of an update of element type `dtype`."""
    width = WIDTH[dtype]
    source = update.cast("B")[start * width : stop * width]
    if dtype == "float32":
        return np.frombuffer(source, np.float32)
    values = np.empty(stop - start, np.float32)
    widen(source, dtype, values)
    return values
