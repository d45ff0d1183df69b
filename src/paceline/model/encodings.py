"""Encodings of float32 numbers in few bits. `codecs.py` has them by name. Needs no torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

CHUNK = 1 << 16  # elements that are encoded together, while they are in the cache; a whole number of blocks
SMALLEST = np.float32(2.0**-120)  # a smaller scale counts as 0: its inverse would not be finite


class Codec(ABC):
    """An encoding of float32 numbers."""

    name: str
    parts = 1  # of which each body has one
    is_sparse = False  # does a body have few of the numbers?

    @property
    def whole(self) -> Codec:
        """The codec that sends all parts at once."""
        return self

    @abstractmethod
    def size(self, elements: int) -> int:
        """Return the number of bytes of this many elements."""

    @abstractmethod
    def encode(self, values: Floats, into: Bytes, left: Floats, turn: int = 0) -> None:
        """Encode `values` plus `left` into `into`, and keep in `left` what the code leaves out of them.

        turn: the number of the update. It decides which part is sent, if a body has one part of the numbers.
        Nothing is left of a block with a number that is not finite: its update will be refused, and must not spoil the
        next one.
        """

    @abstractmethod
    def decode(self, body: Bytes, into: Floats) -> None:
        """Decode a body into `into`."""


class Integers(Codec):
    """Multiples of a scale that the numbers of a block share."""

    def __init__(self, bits: int, block: int) -> None:
        self.name, self._bits, self._block = f"int{bits}", bits, block
        self._largest = (1 << (bits - 1)) - 1

    def size(self, elements: int) -> int:
        return 2 * -(-elements // self._block) + -(-elements * self._bits // 8)

    def encode(self, values: Floats, into: Bytes, left: Floats, turn: int = 0) -> None:
        scales, codes = self._parts(into, values.size)
        scratch = np.empty(min(CHUNK, values.size), np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            for start in range(0, values.size, CHUNK):
                part = left[start : start + CHUNK]
                np.add(part, values[start : start + CHUNK], out=part)
                code = codes[start * self._bits // 8 : (start + CHUNK) * self._bits // 8]
                full = part.size - part.size % self._block
                first, border = start // self._block, full * self._bits // 8
                if full:
                    blocks, count = part[:full].reshape(-1, self._block), full // self._block
                    self._encode_blocks(blocks, scales[first : first + count], code[:border], scratch[:full])
                if full < part.size:
                    rest = part[full:].reshape(1, -1)
                    self._encode_blocks(rest, scales[-1:], code[border:], scratch[: part.size - full])

    def _encode_blocks(self, blocks: Floats, scales: npt.NDArray[np.uint16], codes: Bytes, scratch: Floats) -> None:
        """Encode blocks, and leave in them what the code leaves out. scratch: of their size."""
        scaled = scratch.reshape(blocks.shape)
        np.abs(blocks, out=scaled)
        scale, scales[:] = _rounded_up(_largest_of_rows(scaled) * np.float32(1 / self._largest))
        np.multiply(blocks, _inverse(scale)[:, None], out=scaled)
        np.rint(scaled, out=scaled)
        is_finite = np.isfinite(scale * np.float32(self._largest))
        if not is_finite.all():
            scaled[~is_finite] = self._largest  # is decoded to infinity or NaN
        self._pack(scratch, codes)
        np.multiply(scaled, scale[:, None], out=scaled)
        np.subtract(blocks, scaled, out=blocks)
        if not is_finite.all():
            blocks[~is_finite] = 0

    def decode(self, body: Bytes, into: Floats) -> None:
        scales, codes = self._parts(body, into.size)
        for start in range(0, into.size, CHUNK):
            part = into[start : start + CHUNK]
            first = start // self._block
            scale = _widened(scales[first : first + -(-part.size // self._block)])
            whole = self._unpacked(codes, start, part.size)
            full = part.size - part.size % self._block
            with np.errstate(invalid="ignore", over="ignore"):
                count = full // self._block
                np.multiply(
                    whole[:full].reshape(-1, self._block),
                    scale[:count, None],
                    out=part[:full].reshape(-1, self._block),
                )
                if full < part.size:
                    np.multiply(whole[full:], scale[-1], out=part[full:])

    def _parts(self, body: Bytes, elements: int) -> tuple[npt.NDArray[np.uint16], Bytes]:
        """Return the scales and the codes of a body."""
        blocks = -(-elements // self._block)
        return body[: 2 * blocks].view("<u2"), body[2 * blocks :]

    def _pack(self, whole: Floats, codes: Bytes) -> None:
        """Write whole numbers as codes."""
        if self._bits == 8:
            np.copyto(codes.view(np.int8), whole, casting="unsafe")
            return
        even = whole.size - whole.size % 2
        pairs = np.dot(whole[:even].reshape(-1, 2), FIRST_AND_SECOND)
        np.copyto(codes.view(np.int8)[: even // 2], pairs, casting="unsafe")
        if even < whole.size:
            codes[-1:].view(np.int8)[:] = int(whole[-1])

    def _unpacked(self, codes: Bytes, start: int, count: int) -> npt.NDArray[Any]:
        if self._bits == 8:
            return codes[start : start + count].view(np.int8)
        pairs: npt.NDArray[Any] = PAIRS[codes[start // 2 : (start + count + 1) // 2]]
        return pairs.view(np.float32)[:count]


#: Two numbers from −7 to 7 are one byte: the first plus 16 times the second.
FIRST_AND_SECOND = np.array([1, 16], np.float32)


def _pairs_of_int4() -> npt.NDArray[np.float64]:
    """Return the two numbers of each byte in float32, as the bits of one float64."""
    byte = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.int16)
    first = (byte + 8) % 16 - 8
    return np.stack([first, (byte - first) // 16], axis=1).astype(np.float32).view(np.float64)[:, 0]


PAIRS = _pairs_of_int4()


class TopK(Codec):
    """The numbers of each block with the largest magnitudes: a position, a sign, and one of two magnitudes."""

    BLOCK = 4096
    CHUNK = 1 << 18  # elements that are encoded together
    is_sparse = True

    def __init__(self, fraction: float) -> None:
        self.name, self._fraction = f"topk:{fraction!r}", fraction  # exactly: both sides compute sizes from it

    def _kept(self, elements: int) -> int:
        """Return how many numbers of a block are sent."""
        return max(1, min(elements, math.ceil(self._fraction * elements)))

    def _block_size(self, elements: int) -> int:
        kept = self._kept(elements)
        return 4 + 2 * kept + -(-kept // 4)  # the two magnitudes, the positions, and two bits each

    def size(self, elements: int) -> int:
        full, rest = divmod(elements, self.BLOCK)
        return full * self._block_size(self.BLOCK) + (self._block_size(rest) if rest else 0)

    def encode(self, values: Floats, into: Bytes, left: Floats, turn: int = 0) -> None:
        at = 0
        for start in range(0, values.size, self.CHUNK):
            part = left[start : start + self.CHUNK]
            with np.errstate(invalid="ignore", over="ignore"):
                np.add(part, values[start : start + self.CHUNK], out=part)
            full = part.size - part.size % self.BLOCK
            if full:
                at = self._encode_blocks(part[:full].reshape(-1, self.BLOCK), into, at)
            if full < part.size:
                at = self._encode_blocks(part[full:].reshape(1, -1), into, at)

    def _encode_blocks(self, blocks: Floats, into: Bytes, at: int) -> int:
        """Encode blocks, and leave in them what is not sent. Return the place after their codes."""
        count, elements = blocks.shape
        kept, size = self._kept(elements), self._block_size(elements)
        rows = into[at : at + count * size].reshape(count, size)
        flat, places = blocks.reshape(-1), _places_of_largest(blocks, kept)
        chosen = flat[places]
        sizes = np.abs(chosen).reshape(count, kept)
        with np.errstate(invalid="ignore", over="ignore"):
            is_high = sizes > sizes.mean(axis=1, keepdims=True)
            high_count = is_high.sum(axis=1)
            high_sum = np.where(is_high, sizes, 0).sum(axis=1)
            low = (sizes.sum(axis=1) - high_sum) / np.maximum(kept - high_count, 1)
            levels, bits = _rounded_up(np.stack([low, high_sum / np.maximum(high_count, 1)], axis=1).astype(np.float32))
            sent = np.where(is_high, levels[:, 1:], levels[:, :1]).reshape(-1)
            flat[places] = chosen - np.copysign(sent, chosen)
            blocks[~np.isfinite(levels).all(axis=1)] = 0
        is_negative = np.signbit(chosen).reshape(count, kept)
        positions = places.reshape(count, kept) % elements
        rows[:, :4] = bits.astype("<u2").view(np.uint8)
        rows[:, 4 : 4 + 2 * kept] = positions.astype("<u2").view(np.uint8)
        codes = np.zeros((count, 4 * -(-kept // 4)), np.uint8)
        codes[:, :kept] = is_high.astype(np.uint8) | is_negative.astype(np.uint8) << np.uint8(1)
        fours = codes.reshape(count, -1, 4)
        rows[:, 4 + 2 * kept :] = fours[..., 0] | fours[..., 1] << 2 | fours[..., 2] << 4 | fours[..., 3] << 6
        return int(at + count * size)

    def decode(self, body: Bytes, into: Floats) -> None:
        at = 0
        for start in range(0, into.size, self.CHUNK):
            part = into[start : start + self.CHUNK]
            part[:] = 0
            full = part.size - part.size % self.BLOCK
            if full:
                size = self.size(full)
                self._decode_blocks(body[at : at + size], part[:full].reshape(-1, self.BLOCK))
                at += size
            if full < part.size:
                self._decode_blocks(body[at:], part[full:].reshape(1, -1))

    def _decode_blocks(self, body: Bytes, blocks: Floats) -> None:
        count, elements = blocks.shape
        kept, size = self._kept(elements), self._block_size(elements)
        rows = body.reshape(count, size)
        levels = _widened(np.ascontiguousarray(rows[:, :4]).view("<u2"))
        positions = np.ascontiguousarray(rows[:, 4 : 4 + 2 * kept]).view("<u2").astype(np.int64)
        if positions.size and positions.max() >= elements:
            raise ValueError(f"a position of a {self.name} update lies outside its block of {elements} elements")
        packed = rows[:, 4 + 2 * kept :, None] >> np.array([0, 2, 4, 6], np.uint8)
        codes = packed.reshape(count, -1)[:, :kept]
        values = np.where(codes & 1, levels[:, 1:], levels[:, :1])
        np.put_along_axis(blocks, positions, np.where(codes & 2, -values, values), axis=1)


def _largest_of_rows(rows: Floats) -> Floats:
    """Return the largest number of each row."""
    width = rows.shape[1]
    if width & (width - 1):
        largest: Floats = rows.max(axis=1)
        return largest
    found = rows.reshape(-1)
    while width > 1:  # three times as fast as `max` for short rows
        found = np.maximum(found[::2], found[1::2])
        width //= 2
    return found


def _places_of_largest(rows: Floats, kept: int) -> npt.NDArray[np.int64]:
    """Return the places of the largest magnitudes of each row, in their order. NaN counts as the largest."""
    count, elements = rows.shape
    bits = np.abs(rows).view(np.int32)  # are in the same order as the magnitudes, and partitioned faster
    least = np.partition(bits, elements - kept, axis=1)[:, elements - kept, None]
    places: npt.NDArray[np.int64] = np.flatnonzero(bits >= least)
    if places.size == count * kept:
        return places
    chosen = np.argpartition(bits, elements - kept, axis=1)[:, elements - kept :]  # some numbers are equal
    chosen.sort(axis=1)
    return np.asarray(chosen + elements * np.arange(count)[:, None], np.int64).reshape(-1)


def _rounded_up(scales: Floats) -> tuple[Floats, npt.NDArray[np.uint16]]:
    """Return scales rounded up to bfloat16, so that no number exceeds the largest code, and the bits of that."""
    small = np.where(scales < SMALLEST, np.float32(0), scales)
    bits = ((small.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)
    bits[np.isnan(scales)] = 0x7FC0
    return _widened(bits), bits


def _widened(bits: npt.NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _inverse(scales: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        return np.where(scales > 0, np.float32(1) / scales, np.float32(0))
