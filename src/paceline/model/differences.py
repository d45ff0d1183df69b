"""A model that is sent again and again, each time by how much it differs from what the receiver has. Needs no torch.

Both ends of a connection keep the model as the receiver has it. The sender encodes the difference of its own model to
that one (`codecs`), and both ends add what the code says. So whatever a code leaves out is a part of the next
difference, and the two ends stay equal, bit for bit.
"""

from __future__ import annotations

import numpy as np

from paceline.model.codecs import codec, decode, encoded_size
from paceline.model.encodings import Floats
from paceline.model.one_part import OnePart

EXACT = "float32"


def way_back(name: str) -> str:
    """Return the codec in which the model comes back, if workers push in the codec `name`.

    With `topk` it comes back as `int4`. Each worker pushes other numbers, and they all are in the difference. If a pull
    had the largest of them only, most numbers of a worker's model would be many exchanges old.
    """
    return "int4" if name.startswith("topk") else name


class FollowedModel:
    """One piece of a model, as the receiver of a connection has it. Each end of the connection has one of these."""

    def __init__(self, name: str, elements: int, unencoded: int = 0) -> None:
        """name: of the codec. unencoded: how many elements at the end are running statistics, which are sent exactly.

        Raise ValueError if there is no such codec.
        """
        self._codec, self._trained = codec(name), elements - unencoded
        self.values: Floats = np.empty(elements, np.float32)
        self._is_known = False  # are there values yet?
        self._part = 0  # that is sent next, if a body has one part of the numbers

    @property
    def next_type(self) -> str:
        """How the model is sent next: in float32 at first, and as an encoded difference from then on."""
        return self._codec.name if self._is_known else EXACT

    def size(self, dtype: str) -> int:
        """Return the bytes of a body of this type. Raise ValueError if the model cannot be sent so now."""
        if dtype not in (EXACT, self.next_type):
            raise ValueError(f"the model is sent as {self.next_type} now, not as {dtype!r:.40}")
        return encoded_size(dtype, self._trained, self.values.size - self._trained)

    def encode(self, difference: Floats) -> memoryview:
        """Encode by how much the sender's model differs from `values`, and change them as the receiver will.

        difference: is overwritten. Its running statistics are values, and not differences.
        """
        unencoded = self.values.size - self._trained
        body = np.empty(encoded_size(self._codec.name, self._trained, unencoded), np.uint8)
        border = self._codec.size(self._trained)
        nothing = np.broadcast_to(np.float32(0), self._trained)
        body[border:] = difference[self._trained :].view(np.uint8)
        self._codec.encode(nothing, body[:border], difference[: self._trained], self._part)
        self._add(body.data, self._codec.name, difference)
        return body.data

    def answer_to(self, push: memoryview, dtype: str) -> None:
        """Send that part next which the receiver has pushed, if a body has one part of the numbers.

        So its model changes only where it has sent all of its own steps. Raise ValueError if there is no such part.
        """
        if isinstance(self._codec, OnePart) and dtype == self._codec.name:
            self._part = self._codec.part_of(np.frombuffer(push, np.uint8))

    def subtract_from(self, values: Floats) -> Floats:
        """Return the difference that `encode` wants if the sender's model has these values."""
        difference = values.copy()
        with np.errstate(invalid="ignore", over="ignore"):
            difference[: self._trained] -= self.values[: self._trained]
        return difference

    def receive(self, body: memoryview, dtype: str) -> None:
        """Change the values as a body says. Raise ValueError if it is damaged."""
        if len(body) != (due := self.size(dtype)):
            raise ValueError(f"{self.values.size} elements of {dtype} are {due} bytes, not {len(body)}")
        if dtype == EXACT:
            self.set(np.frombuffer(body, np.float32))
        else:
            self._add(body, dtype, np.empty_like(self.values))

    def set(self, values: Floats) -> None:
        """Set the values to those that are sent exactly."""
        np.copyto(self.values, values)
        self._is_known = True

    def _add(self, body: memoryview, dtype: str, decoded: Floats) -> None:
        """Add an encoded difference. decoded: an array for it."""
        decode(body, dtype, decoded, self.values.size - self._trained)
        with np.errstate(invalid="ignore", over="ignore"):
            self.values[: self._trained] += decoded[: self._trained]
        self.values[self._trained :] = decoded[self._trained :]
