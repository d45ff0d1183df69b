"""Conversion of elements of two bytes to float32."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.model.half_precision import widen

SPECIAL = [0.0, -0.0, 1.0, -2.5, float("inf"), float("-inf"), float("nan")]


def test_every_float16_is_converted_exactly() -> None:
    every = np.arange(2**16, dtype="<u2")
    into = np.empty(2**16, np.float32)
    widen(every.tobytes(), "float16", into)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(into, every.view("<f2").astype(np.float32))


def test_every_bfloat16_is_converted_exactly() -> None:
    torch = pytest.importorskip("torch")
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    into = np.empty(2**16, np.float32)
    widen(memoryview(bytearray(every.view(torch.uint16).numpy().tobytes())), "bfloat16", into)
    np.testing.assert_array_equal(into, every.float().numpy())


def test_float32_is_copied() -> None:
    into = np.empty(len(SPECIAL), np.float32)
    widen(np.array(SPECIAL, "<f4").tobytes(), "float32", into)
    np.testing.assert_array_equal(into, np.array(SPECIAL, np.float32))


@pytest.mark.parametrize("size", [0, 5, 7, 8])
def test_a_wrong_number_of_bytes_is_refused(size: int) -> None:
    into = np.ones(3, np.float32)
    with pytest.raises(ValueError, match=f"3 elements of float16 are 6 bytes, not {size}"):
        widen(bytes(size), "float16", into)
    assert into.tolist() == [1, 1, 1]


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="not 'int8'"):
        widen(b"", "int8", np.empty(0, np.float32))
