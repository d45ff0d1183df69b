"""Small encodings of an update: fewer bits for each number, or only the largest numbers. Needs no torch.

- `int8`, `int4`: the numbers of a block share a scale, and each is a multiple of it.
- `topk:F`: of each block, the fraction F with the largest magnitudes is sent: a position, a sign, and one of two
  magnitudes. All other numbers are decoded as 0.

What an encoding leaves out is not lost if the sender adds it to its next update (`Encoder`). The number of bytes
follows from the number of elements alone. If a number of a block is not finite, at least one of its decoded numbers is
not finite.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.model.half_precision import WIDTH, widen

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

NAMES = "int8, int4 or topk:F, such as topk:0.02"
CHUNK = 1 << 16  # elements that are encoded together, while they are in the cache; a whole number of blocks
SMALLEST = np.float32(2.0**-120)  # a smaller scale counts as 0: its inverse would not be finite


class Codec(ABC):
    """An encoding of float32 numbers."""

    name: str

    @abstractmethod
    def size(self, elements: int) -> int:
        """Return the number of bytes of this many elements."""

    @abstractmethod
    def encode(self, values: Floats, into: Bytes, left: Floats) -> None:
        """Encode `values` plus `left` into `into`, and keep in `left` what the code leaves out of them.

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

    def encode(self, values: Floats, into: Bytes, left: Floats) -> None:
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

    def encode(self, values: Floats, into: Bytes, left: Floats) -> None:
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


@lru_cache(maxsize=64)
def codec(name: str) -> Codec:
    """Return a codec by its name. Raise ValueError with one sentence if there is none."""
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
    """

    def __init__(self, name: str, elements: int) -> None:
        """elements: of the whole model, without its running statistics, which are not encoded."""
        self.codec = codec(name)
        self.left = np.zeros(elements, np.float32)

    def size(self, start: int, stop: int) -> int:
        """Return the bytes in which the elements from `start` to `stop` are encoded."""
        trained = min(stop, max(start, self.left.size)) - start
        return encoded_size(self.codec.name, trained, stop - start - trained)

    def encode(self, update: memoryview, dtype: str, start: int, stop: int) -> memoryview:
        """Encode the elements from `start` to `stop` of an update of element type `dtype`. Call this once for each."""
        left, values = self.left[start:stop], _values(update, dtype, start, stop)
        body = np.empty(self.size(start, stop), np.uint8)
        border = self.codec.size(left.size)
        self.codec.encode(values[: left.size], body[:border], left)
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


def _values(update: memoryview, dtype: str, start: int, stop: int) -> Floats:
    """Return the elements from `start` to `stop` of an update of element type `dtype`."""
    width = WIDTH[dtype]
    source = update.cast("B")[start * width : stop * width]
    if dtype == "float32":
        return np.frombuffer(source, np.float32)
    values = np.empty(stop - start, np.float32)
    widen(source, dtype, values)
    return values


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
