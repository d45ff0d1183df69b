"""An encoding that sends one part of the numbers at a time, and another one each time. Needs no torch.

The numbers are divided into parts of equal length. What is not sent is left for a later update.
"""

from __future__ import annotations

import numpy as np

from paceline.model.encodings import Bytes, Codec, Floats

LARGEST = 256  # number of parts
HEAD = 4  # bytes before the code of a part: its number


class Exact(Codec):
    """The numbers themselves."""

    name = "float32"

    def size(self, elements: int) -> int:
        return 4 * elements

    def encode(self, values: Floats, into: Bytes, left: Floats, turn: int = 0) -> None:
        with np.errstate(invalid="ignore", over="ignore"):
            np.add(values, left, out=into.view("<f4"))
        left[:] = 0

    def decode(self, body: Bytes, into: Floats) -> None:
        into[:] = body.view("<f4")


class OnePart(Codec):
    """One of several parts of the numbers. The others are decoded as 0."""

    def __init__(self, inner: Codec, parts: int) -> None:
        """inner: the encoding of a part."""
        self.name, self._inner, self.parts = f"{inner.name}/{parts}", inner, parts

    @property
    def whole(self) -> Codec:
        return self._inner

    def _length(self, elements: int) -> int:
        """Return the length of a part. The last parts may be shorter, or empty, and are filled up with zeros."""
        return -(-elements // self.parts)

    def size(self, elements: int) -> int:
        return HEAD + self._inner.size(self._length(elements))

    def encode(self, values: Floats, into: Bytes, left: Floats, turn: int = 0) -> None:
        with np.errstate(invalid="ignore", over="ignore"):
            np.add(left, values, out=left)
            is_finite = bool(np.isfinite(np.dot(left, left))) or bool(np.isfinite(left).all())
        part = turn % self.parts
        if not is_finite:  # also if the number is in a part that is not sent now
            is_bad = ~np.isfinite(left)
            with np.errstate(invalid="ignore", over="ignore"):
                np.subtract(left, values, out=left)
            left[is_bad] = 0
            part = self.parts
            into[HEAD:] = 0
        into[:HEAD] = np.array([part], "<u4").view(np.uint8)
        if not is_finite:
            return
        length = self._length(left.size)
        sent = left[part * length : (part + 1) * length]
        whole = sent if sent.size == length else np.zeros(length, np.float32)
        whole[: sent.size] = sent
        self._inner.encode(np.broadcast_to(np.float32(0), length), into[HEAD:], whole)
        sent[:] = whole[: sent.size]

    def decode(self, body: Bytes, into: Floats) -> None:
        part, length = self.part_of(body), self._length(into.size)
        into[:] = 0
        if part == self.parts:
            into[:1] = np.nan
            return
        sent = into[part * length : (part + 1) * length]
        whole = sent if sent.size == length else np.empty(length, np.float32)
        self._inner.decode(body[HEAD:], whole)
        sent[:] = whole[: sent.size]

    def part_of(self, body: Bytes) -> int:
        """Return the number of the part that a body has, or the number of parts if an element was not finite.

        Raise ValueError if there is no such part.
        """
        (part,) = body[:HEAD].view("<u4").tolist()
        if part > self.parts:
            raise ValueError(f"a part of {self.name} has the number {part}, and the last one has {self.parts - 1}")
        return int(part)
