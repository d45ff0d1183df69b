"""Differences of a model to what the receiver has: both ends stay equal, and what a code leaves out comes later."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.model.codecs import Encoder, codec, encoded_size
from paceline.model.differences import EXACT, FollowedModel
from tries import tries

NAMES = ["int8", "int4", "topk:0.02", "topk:1", "int4/4", "float32/3"]
every_codec = pytest.mark.parametrize("name", NAMES)
Floats = npt.NDArray[np.float32]


class Ends:
    """Both ends of a connection."""

    def __init__(self, name: str, elements: int, unencoded: int = 0) -> None:
        self.sender, self.receiver = (FollowedModel(name, elements, unencoded) for _ in range(2))
        self._pushes, self._pushed = Encoder(name, elements - unencoded), 0

    def push(self) -> None:
        """Let the receiver push an update of zeros. Codecs of one part send the same part back."""
        nothing = np.zeros(self.sender.values.size, np.float32)
        body = self._pushes.encode(nothing.data, EXACT, 0, self._pushes.left.size, self._pushed)
        self.sender.answer_to(body, self._pushes.codec.name)
        self._pushed += 1

    def send(self, values: Floats, exact: bool = False) -> int:
        """Send a model, and check that both ends then have the same. Return the bytes that were sent."""
        how = EXACT if exact else self.sender.next_type
        if how == EXACT:
            self.sender.set(values)
            body = self.sender.values.data.cast("B")
        else:
            body = self.sender.encode(self.sender.subtract_from(values))
        assert len(body) == self.receiver.size(how)
        self.receiver.receive(body, how)
        assert self.sender.values.tobytes() == self.receiver.values.tobytes()
        return len(body)


def walk(seed: int, elements: int, steps: int, scale: float = 1.0) -> list[Floats]:
    """Return a model that changes in every step."""
    moves = np.random.default_rng(seed).standard_normal((steps, elements), dtype=np.float32) * np.float32(scale)
    return [*np.cumsum(moves, axis=0, dtype=np.float32)]


@tries(40, 300)
@given(
    st.sampled_from(NAMES),
    st.one_of(st.integers(0, 700), st.just(4097)),
    st.integers(0, 40),
    st.integers(0, 2**32),
    st.floats(1e-6, 1e6),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_both_ends_have_the_same_model(
    name: str, trained: int, statistics: int, seed: int, scale: float, exact: list[bool]
) -> None:
    ends = Ends(name, trained + statistics, statistics)
    for number, values in enumerate(walk(seed, trained + statistics, 4, scale)):
        before = ends.sender.values.copy()
        was_first = ends.sender.next_type == EXACT
        size = ends.send(values, exact[number])
        has = ends.receiver.values
        assert np.array_equal(has[trained:], values[trained:])
        if was_first or exact[number]:
            assert np.array_equal(has, values)
            assert size == 4 * values.size
        else:
            assert size == encoded_size(name, trained, statistics)
            missed, due = np.abs(has - values)[:trained], np.abs(before - values)[:trained]
            assert missed.max(initial=0) <= due.max(initial=0) * 1.01
            assert np.linalg.norm(missed) <= np.linalg.norm(due) * 1.01


@pytest.mark.parametrize(
    ("name", "rounds"), [("int8", 3), ("int4", 6), ("topk:0.2", 30), ("int4/5", 30), ("float32/3", 3)]
)
def test_a_model_that_rests_is_reached(name: str, rounds: int) -> None:
    ends = Ends(name, 3000)
    first, second = walk(0, 3000, 2)
    ends.send(first)
    for _ in range(rounds):
        ends.push()
        ends.send(second)
    assert np.abs(ends.receiver.values - second).max() < 2e-4


@every_codec
def test_errors_do_not_add_up(name: str) -> None:
    """After many steps, the receiver is about as far from the model as after a few."""
    ends, far = Ends(name, 4096), []
    for values in walk(1, 4096, 120):
        ends.push()
        ends.send(values)
        far.append(float(np.abs(ends.receiver.values - values).mean()))
    assert max(far[100:]) <= 1.2 * max(far[40:60]) + 1e-6


@pytest.mark.parametrize("name", ["int4/4", "float32/3"])
def test_the_part_that_was_pushed_comes_back(name: str) -> None:
    """The receiver has its own steps in all others, and the sender does not know them yet."""
    ends, parts = Ends(name, 1000), codec(name).parts
    first, *others = walk(3, 1000, 2 * parts + 1)
    ends.send(first)
    length = -(-1000 // parts)
    for turn, values in enumerate(others):
        before = ends.receiver.values.copy()
        ends.push()
        ends.send(values)
        changed = np.flatnonzero(ends.receiver.values != before)
        part = turn % parts
        assert part * length <= changed.min() < changed.max() < (part + 1) * length
        assert changed.size > 0.7 * (min(1000, (part + 1) * length) - part * length)


@every_codec
def test_numbers_that_are_not_finite_arrive_as_such(name: str) -> None:
    ends = Ends(name, 500)
    first, second = walk(0, 500, 2)
    ends.send(first)
    second[7] = np.nan
    ends.send(second)
    assert not np.isfinite(ends.receiver.values).all()
    ends.send(first, exact=True)
    assert np.array_equal(ends.receiver.values, first)


@every_codec
@pytest.mark.parametrize("change", [-1, 1, 500])
def test_a_body_of_another_size_is_refused(name: str, change: int) -> None:
    model = FollowedModel(name, 500, 20)
    with pytest.raises(ValueError, match="are 2000 bytes, not"):
        model.receive(memoryview(bytes(2000 + change)), EXACT)
    model.set(np.ones(500, np.float32))
    with pytest.raises(ValueError, match="bytes, not"):
        model.receive(memoryview(bytes(encoded_size(name, 480, 20) + change)), model.next_type)
    assert np.array_equal(model.values, np.ones(500, np.float32))


def test_a_position_outside_its_block_is_refused() -> None:
    model = FollowedModel("topk:0.02", 500)
    model.set(np.ones(500, np.float32))
    with pytest.raises(ValueError, match="lies outside"):
        model.receive(memoryview(b"\xff" * encoded_size("topk:0.02", 500)), "topk:0.02")


@pytest.mark.parametrize("dtype", ["int4", "bfloat16", "nonsense"])
def test_only_the_agreed_codec_is_taken(dtype: str) -> None:
    model: Any = FollowedModel("int8", 500)
    with pytest.raises(ValueError, match="sent as float32 now, not as 'int8'"):
        model.size("int8")  # nothing is known of the model yet
    model.set(np.ones(500, np.float32))
    with pytest.raises(ValueError, match=f"sent as int8 now, not as '{dtype}'"):
        model.size(dtype)
