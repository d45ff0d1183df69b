"""Small encodings of updates: bounded errors, error feedback that loses nothing, and damaged bodies."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.model.codecs import Encoder, codec, decode, encoded_size
from paceline.model.encodings import CHUNK, Integers, TopK
from paceline.model.half_precision import narrow
from tries import tries

NAMES = ["int8", "int4", "topk:0.02", "topk:0.3", "topk:1", "int4/4", "int8/3", "float32/7"]
every_codec = pytest.mark.parametrize("name", NAMES)
Floats = npt.NDArray[np.float32]


@st.composite
def updates(draw: st.DrawFn) -> Floats:
    """Return numbers of any size, some of them 0, equal or of very different magnitudes."""
    count = draw(st.one_of(st.integers(0, 700), st.sampled_from([4095, 4096, 4097, 9000, CHUNK - 1, CHUNK + 65])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["normal", "heavy", "equal", "sparse", "tiny"]))
    values: Floats = rng.standard_normal(count, dtype=np.float32)
    if kind == "heavy":
        values **= np.float32(9)
    elif kind == "equal":
        values = np.sign(values)
    elif kind == "sparse":
        values[rng.random(count) < 0.99] = 0
    elif kind == "tiny":
        values *= np.float32(1e-39)
    return values * np.float32(10.0 ** draw(st.integers(-3, 3)))


def coded(values: Floats, name: str, left: Floats | None = None) -> tuple[Floats, Floats]:
    """Return the decoded values, and what is left."""
    left = np.zeros_like(values) if left is None else left.copy()
    body = np.empty(encoded_size(name, values.size), np.uint8)
    codec(name).encode(values, body, left)
    decoded = np.empty_like(values)
    decode(body, name, decoded)
    return decoded, left


def by_block(values: Floats, block: int) -> Floats:
    return np.concatenate([values, np.zeros(-values.size % block, np.float32)]).reshape(-1, block)


@tries(60, 400)
@given(updates(), st.sampled_from([("int8", 256, 127), ("int4", 64, 7)]))
def test_integers_are_off_by_half_a_step_at_most(values: Floats, how: tuple[str, int, int]) -> None:
    """A step is the block's largest magnitude divided by the largest code, and at most 1/128 more, for bfloat16."""
    name, block, largest = how
    decoded, _ = coded(values, name)
    errors = np.abs(by_block(decoded, block).astype(np.float64) - by_block(values, block))
    steps = np.abs(by_block(values, block)).max(axis=1, initial=0).astype(np.float64) / largest * (1 + 1 / 128)
    assert (errors <= steps[:, None] * 0.5001 + 2.0**-119 * largest).all()


@tries(60, 400)
@given(updates(), st.sampled_from([0.02, 0.3]))
def test_top_k_sends_the_largest_of_each_block(values: Floats, fraction: float) -> None:
    decoded, _ = coded(values, f"topk:{fraction}")
    for start in range(0, values.size, TopK.BLOCK):
        theirs, ours = values[start : start + TopK.BLOCK], decoded[start : start + TopK.BLOCK]
        kept = math.ceil(fraction * theirs.size)
        sent = ours != 0
        assert sent.sum() <= kept
        assert (np.sign(ours[sent]) * np.sign(theirs[sent]) >= 0).all()
        if sent.any() and not sent.all():
            assert np.abs(theirs[sent]).min() >= np.sort(np.abs(theirs))[-kept] * np.float32(0.999)
        assert len(np.unique(np.abs(ours[sent]))) <= 2
        assert np.abs(ours).max(initial=0) <= np.abs(theirs).max(initial=0) * (1 + 1 / 128) + 1e-37


@every_codec
@tries(40, 200)
@given(updates(), updates())
def test_decoded_and_left_sum_to_the_update_and_what_was_left_before(name: str, values: Floats, before: Floats) -> None:
    size = min(values.size, before.size)
    values, before = values[:size], before[:size]
    decoded, left = coded(values, name, before)
    scale = np.abs(values).max(initial=0) + np.abs(before).max(initial=0)
    assert np.allclose(decoded.astype(np.float64) + left, values.astype(np.float64) + before, 0, 1e-6 * scale + 1e-37)


@every_codec
def test_error_feedback_sends_the_truth_in_the_end(name: str) -> None:
    """The sum of what is sent differs from the sum of all updates by what is left, which does not grow."""
    rng = np.random.default_rng(1)
    elements, rounds = 10_001, 400
    constant: Floats = rng.standard_normal(elements, dtype=np.float32)
    encoder, sent, true = Encoder(name, elements), np.zeros(elements), np.zeros(elements)
    for turn in range(rounds):
        update = constant + rng.standard_normal(elements, dtype=np.float32)
        into = np.empty(elements, np.float32)
        decode(encoder.encode(update.data, "float32", 0, elements, turn), name, into)
        sent += into
        true += update
    assert np.allclose(sent + encoder.left, true, atol=1e-2)
    assert np.linalg.norm(sent - true) < 0.2 * np.linalg.norm(true)


@every_codec
def test_a_worker_with_local_steps_makes_most_of_what_topk_leaves_again(name: str) -> None:
    """So only a part of it is sent later. The rest of other codes is small, or kept in the worker's model."""
    rng = np.random.default_rng(6)
    encoder, update = Encoder(name, 5000, local_steps=True), rng.standard_normal(5000, dtype=np.float32)
    encoder.encode(update.data, "float32", 0, 5000)
    before, into = encoder.left.copy(), np.empty(5000, np.float32)
    decode(encoder.encode(update.data, "float32", 0, 5000, 1), name, into)
    kept = 0.5 if name.startswith("topk") else 1.0
    assert np.allclose(into + encoder.left, update + kept * before, atol=1e-5)


@every_codec
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_in_half_precision_are_encoded_too(name: str, dtype: str) -> None:
    values = np.random.default_rng(2).standard_normal(5000, dtype=np.float32)
    narrowed = np.empty(5000, np.uint16)
    narrow(values, dtype, narrowed)
    exact = np.empty(5000, np.float32)
    decode(narrowed, dtype, exact)
    body = Encoder(name, 5000).encode(narrowed.data, dtype, 100, 4100)
    expected = Encoder(name, 5000).encode(exact.data, "float32", 100, 4100)
    assert bytes(body) == bytes(expected)


@every_codec
def test_only_the_range_that_is_encoded_changes_what_is_left(name: str) -> None:
    values = np.random.default_rng(3).standard_normal(9000, dtype=np.float32)
    encoder = Encoder(name, 9000)
    encoder.encode(values.data, "float32", 1000, 3001)
    assert encoder.left[1000:3001].any() or name == "topk:1"
    assert not encoder.left[:1000].any()
    assert not encoder.left[3001:].any()


@every_codec
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.4e38])
@pytest.mark.parametrize("place", [0, 4999])
def test_a_number_that_is_not_finite_stays_so_and_leaves_nothing(name: str, value: float, place: int) -> None:
    """3.4e38 is finite, and its scale is rounded up to infinity: the update is refused either way, not changed."""
    values = np.random.default_rng(4).standard_normal(5000, dtype=np.float32)
    values[place] = value
    decoded, left = coded(values, name)
    is_sent = not np.isfinite(decoded).all() or (math.isfinite(value) and abs(decoded[place] / value - 1) < 0.01)
    assert is_sent or (codec(name).parts > 1 and left[place] == np.float32(value))
    assert np.isfinite(left).all()


@every_codec
def test_the_size_follows_from_the_number_of_elements(name: str) -> None:
    for elements in (0, 1, 2, 63, 64, 65, 257, 4095, 4096, 4097, 20_001):
        left = np.zeros(elements, np.float32)
        body = np.full(encoded_size(name, elements) + 3, 0xAB, np.uint8)
        codec(name).encode(np.ones(elements, np.float32), body[:-3], left)
        assert (body[-3:] == 0xAB).all()


def test_the_bits_of_a_number() -> None:
    million = 1 << 20
    bits = {name: 8 * encoded_size(name, million) / million for name in NAMES}
    assert bits["int8"] == 8.0625
    assert bits["int4"] == 4.25
    assert bits["topk:0.02"] == pytest.approx(0.369, abs=0.001)


@every_codec
@tries(60, 400)
@given(st.integers(0, 5000), st.binary(max_size=64), st.integers(0, 2**32))
def test_damaged_bodies_are_decoded_or_refused(name: str, elements: int, some: bytes, seed: int) -> None:
    """A body of the right size may decode to anything, but nothing outside of it is read or written."""
    body = np.random.default_rng(seed).integers(0, 256, encoded_size(name, elements), np.uint8)
    body[: len(some)] = np.frombuffer(some, np.uint8)[: body.size]
    into = np.full(elements + 2, 7, np.float32)
    try:
        decode(body, name, into[1:-1])
    except ValueError as error:
        assert "outside its block" in str(error) or "the last one has" in str(error)
    assert into[0] == into[-1] == 7
    with pytest.raises(ValueError, match=f"{elements} elements of {name} are {body.size} bytes, not {body.size + 1}"):
        decode(bytes(body.size + 1), name, into[1:-1])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "int3",
            "updates are encoded as int8, int4, topk:F such as topk:0.02, or a part at a time such as int4/4, not as "
            "'int3'",
        ),
        ("topk", "from 0.0001 to 1, such as topk:0.02"),
        ("topk:2", "from 0.0001 to 1"),
        ("topk:nan", "from 0.0001 to 1"),
        ("topk:x", "from 0.0001 to 1"),
        ("", "not as ''"),
        ("int4/1", "name int8, int4 or float32, and 2 to 256 parts, such as int4/4, not 'int4/1'"),
        ("int4/257", "2 to 256 parts"),
        ("int4/", "2 to 256 parts"),
        ("int4/²", "2 to 256 parts"),
        ("topk:0.02/4", "name int8, int4 or float32"),
        ("bfloat16/4", "name int8, int4 or float32"),
    ],
)
def test_an_unknown_name_is_refused_with_one_sentence(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        codec(name)


def test_names() -> None:
    assert isinstance(codec("int8"), Integers)
    assert codec("topk:0.020").name == "topk:0.02"
    assert codec("int4/04").name == "int4/4"


@tries(60, 400)
@given(st.integers(1, 4096), st.integers(0, 9000))
def test_a_name_gives_the_same_codec_again(kept: int, elements: int) -> None:
    """The shard knows the codec by its name alone, and must compute the same sizes, also of fractions of 13 digits."""
    ours = codec(f"topk:{kept / 4096!r}")
    theirs = codec(ours.name)
    assert [theirs.size(size) for size in (elements, 4096)] == [ours.size(size) for size in (elements, 4096)]


@every_codec
@pytest.mark.parametrize("local_steps", [False, True])
def test_an_update_that_is_taken_back_leaves_no_trace(name: str, local_steps: bool) -> None:
    rng = np.random.default_rng(5)
    encoder = Encoder(name, 5000, local_steps)
    encoder.encode(rng.standard_normal(5000, dtype=np.float32).data, "float32", 0, 5000)
    before = encoder.left.copy()
    update = rng.standard_normal(5000, dtype=np.float32)
    body = encoder.encode(update.data, "float32", 100, 5000)
    assert not np.allclose(encoder.left, before, atol=1e-3) or name == "int8"
    encoder.take_back(update.data, "float32", 100, 5000, body)
    assert np.allclose(encoder.left, before, atol=1e-5)


@tries(60, 400)
@given(updates(), updates(), st.sampled_from(["int8", "int4", "float32"]), st.integers(2, 9), st.integers(0, 30))
def test_one_part_at_a_time_is_sent(values: Floats, before: Floats, inner: str, parts: int, turn: int) -> None:
    """The part is coded as it would be alone. All other numbers are left for later."""
    size = min(values.size, before.size)
    values, left = values[:size], before[:size].copy()
    length = -(-size // parts)
    part = slice(turn % parts * length, (turn % parts + 1) * length)
    due = left + values
    decoded = np.empty_like(values)
    encoder = Encoder(f"{inner}/{parts}", size)
    encoder.left[:] = left
    decode(encoder.encode(values.data, "float32", 0, size, turn), encoder.codec.name, decoded)
    alone, left_alone = due[part], np.zeros(0, np.float32)
    if inner != "float32":
        padded = np.zeros(length, np.float32)
        padded[: alone.size] = alone
        alone, left_alone = (each[: alone.size] for each in coded(padded, inner))
        assert np.array_equal(encoder.left[part], left_alone)
    assert np.array_equal(decoded[part], alone)
    others = np.ones(size, bool)
    others[part] = False
    assert not decoded[others].any()
    assert np.array_equal(encoder.left[others], due[others])


@pytest.mark.parametrize("name", ["int4/4", "float32/3", "int8/256"])
def test_after_as_many_updates_as_parts_everything_is_sent(name: str) -> None:
    size, parts = 1001, codec(name).parts
    values = np.random.default_rng(6).standard_normal(size, dtype=np.float32)
    encoder, sent = Encoder(name, size), np.zeros(size, np.float32)
    for turn in range(parts):
        update = values if turn == 0 else np.zeros_like(values)
        into = np.empty_like(values)
        decode(encoder.encode(update.data, "float32", 0, size, turn), name, into)
        sent += into
    steps = {"int4": 1 / 7, "int8": 1 / 127, "float32": 0}[name.partition("/")[0]]
    assert np.abs(sent - values).max() <= steps * np.abs(values).max() * 0.51
    assert encoded_size(name, 1 << 20) * parts < encoded_size(name.partition("/")[0], 1 << 20) * 1.01


def test_a_part_that_does_not_exist_is_refused() -> None:
    body = np.zeros(encoded_size("int4/4", 100), np.uint8)
    body[0] = 5
    with pytest.raises(ValueError, match="a part of int4/4 has the number 5, and the last one has 3"):
        decode(body, "int4/4", np.empty(100, np.float32))
